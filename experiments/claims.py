"""The claims, which are the lines of expected.csv, and the parts of experiments that check them (parts.csv).
expected.csv has the columns

    experiment, claim     the part of an experiment whose result file is compared, and what is compared, in words
    how                   how the value is known: a word of HOW
    metric, cell, over    the value: a column of the result, in the rows whose columns have the values of `cell`
                          (`a=1; b=x|y`); then what it is divided by: a number, or the columns in which the other cell
                          differs (`b=*`: any value)
    low, high, unit       the range that our arithmetic expects, written down before the first run ("%": a share)
    paper, page           the published figure in words, and where it was read: the paper and section, or a public page
    paper_low, paper_high the range that counts as the published figure; empty: it cannot be compared here
    differs               why the result differs from the published figure or, where there is none, from the range

A metric is `column`, `column/column` or another of + - between two columns of a row. It is the median over the rows of
one point, or, with `max`, `min`, `sum` or `mean` before it, that of all rows of the cell. `over` may begin with one of
these words, too. Git is the register of the ranges: `run.py older` names each line that is younger than its result. """
import csv
import os
import re
import statistics
from dataclasses import dataclass, field

from table import TableError

HERE = os.path.dirname(os.path.abspath(__file__))
HOW = {
    "measured": "on this machine's clock",
    "virtual": "the server's code on a virtual clock, with costs that are stated",
    "counted": "instructions, bytes, calls, tokens: no clock",
    "computed": "arithmetic alone",
}
AGGREGATES = {"max": max, "min": min, "sum": sum, "mean": statistics.fmean}
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "/": lambda a, b: a / b}


def conditions(text):
    """`a=1; b=x|y; c!=0` as [(column, wanted, values)]."""
    found = [re.fullmatch(r"(\w+)(!?=)(.*)", word.strip()) for word in text.split(";") if word.strip()]
    if None in found:
        raise ValueError(f"'{text}': expected `column=value; column=value`")
    return [(m[1], m[2] == "=", m[3].split("|")) for m in found]


def value(table, metric, where):
    """The metric over the rows of a sample that meet the conditions."""
    words = re.fullmatch(r"(?:(max|min|sum|mean) )?(\w+)(?:([-+/])(\w+))?", metric)
    if not words:
        raise ValueError(f"'{metric}': expected `column` or `max column/column`")
    aggregate, column, operation, other = words.groups()
    rows = table.where(where)
    points = len({row["point"] for row in rows})
    if points == 0 or points > 1 and not aggregate:
        text = "; ".join(f"{c}{'' if wanted else '!'}={'|'.join(values)}" for c, wanted, values in where)
        raise TableError(f"{table.path}: {points} points with {text or 'no condition'}, expected one")
    numbers = table.numbers(column, rows)
    if operation:
        numbers = [OPERATIONS[operation](a, b) for a, b in zip(numbers, table.numbers(other, rows))]
    return AGGREGATES.get(aggregate, statistics.median)(numbers)


@dataclass
class Claim:
    experiment: str
    claim: str
    how: str
    metric: str
    cell: str
    over: str
    low: float
    high: float
    unit: str
    paper: str
    paper_low: float
    paper_high: float
    page: str
    differs: str
    line: int = 0  # of expected.csv

    def value(self, table):
        """The claim's value in one sample."""
        where = conditions(self.cell)
        number = value(table, self.metric, where)
        if not self.over:
            return number
        if re.fullmatch(r"[\d.]+", self.over):
            return number / float(self.over)
        aggregate, _, other = self.over.partition(" ") if self.over.split(" ")[0] in AGGREGATES else ("", "", self.over)
        replaced = conditions(other)
        where = [c for c in where if c[0] not in {r[0] for r in replaced}] + [r for r in replaced if r[2] != ["*"]]
        column = self.metric.split(" ")[-1]
        return number / value(table, f"{aggregate} {column}".strip() if aggregate else self.metric, where)

    @property
    def comparable(self):
        return self.paper_low is not None

    def show(self, number):
        if self.unit == "%":
            return f"{100 * number:.3g} %"
        digits = f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"
        return digits + (f" {self.unit}" if self.unit else "")

    def range(self, low, high):
        if low == high:
            return self.show(low)
        return self.show(low).removesuffix(f" {self.unit}") + " to " + self.show(high)


@dataclass
class Part:
    """A line of parts.csv: a program that writes one result file."""
    part: str  # EXPERIMENT or EXPERIMENT/PART; result file EXPERIMENT.csv or EXPERIMENT-PART.csv, on a GPU ...-cuda.csv
    device: str  # cpu or cuda
    repeats: int  # 1 where nothing is timed and a repetition would give the same numbers
    needs: tuple  # words of NEEDS in run.py; tool_agent: it reads that trace, or generates it
    question: str
    claims: list = field(default_factory=list)

    @property
    def experiment(self):
        return self.part.split("/")[0]

    @property
    def anchor(self):
        return self.part.replace("/", "-") + ("" if self.device == "cpu" else f"-{self.device}")

    @property
    def file(self):
        return self.anchor + ".csv"

    @property
    def command(self):
        return f"make exp-{self.experiment}" + ("" if self.device == "cpu" else f" DEVICE={self.device}")


# The claim of each row of README.md's table of ideas, by the anchor of CLAIMS.md to which the row links.
FRONT_PAGE = {
    "waste": ("useful, blocks of 16", "share of a full pool that holds KV, blocks of 16"),
    "vattention_speed": ("offline, requests/min, vattention / paged",
                         "requests a minute over those with a block table"),
    "slots": ("TTFT of later turns after 1,024 tokens, slots, kept / contiguous",
              "TTFT of a later turn over that without its slot"),
    "prefix": ("TTFT, 94 % shared / nothing shared", "TTFT with 94 % of the prompt shared, over that with nothing"),
    "offload_virtual": ("tier alone / none", "requests/s of documents asked a third time, host tier over no tier"),
    "paged_attention-cuda": ("decode 32 x 16K, blocks of 16 / contiguous",
                             "decode attention, time over blocks of 16 over contiguous"),
    "kv_dtype": ("tokens, int8 / f16, scales counted", "tokens in the same bytes, int8 over f16"),
    "batching-sarathi_capacity": ("Mistral-7B: chunked / prefill first, ShareGPT, strict objective",
                                  "requests/s within an objective, chunks over whole prompts"),
    "cpp_chunks": ("one prompt: fixed / equal_time, TTFT", "TTFT in a pipeline of 8, equal chunks over equal time"),
    "speculate": ("llama-1b alone, the same: turbo / off", "tokens/s on text that repeats itself, over no drafts"),
    "pd": ("P99 ITL at load 0.4, 1P1D / 1C", "P99 gap between tokens, 1P1D over 1C"),
    "transfer_exposed": ("100 Gb/s, request / layer", "wait for KV, sent at the end over layer by layer"),
    "disagg_orders": ("median first gap at load 0.6, decode_first / push",
                      "median gap after the first token, `decode_first` over `push`"),
    "cpp_vs_tp-bubble": ("90 % of 131K reused, one at a time, equal parts: PP8 / TP",
                         "tokens/s, PP8 over TP8, one prompt, 90 % of it reused"),
    "fetch_or_compute-pool": ("conversation: hits, global / longest prefix",
                              "cache hits, with fetches over by longest prefix"),
    "mooncake_serving": ("schedulers, conversation: mean TTFT, global / local",
                         "mean TTFT, with fetches over without them"),
    "rejection": ("12P1D: correlation of P's and D's load, early", "correlation of P's and D's load"),
    "rejection-reservation": ("reuse 131K, c=8, P holds 0.9 of the prompts: tokens/s, escrow / off",
                              "tokens/s if P holds 0.9 of the prompts, over no reservation"),
    "failure_timeline": ("requests lost", "requests lost when workers are killed"),
}


def load(expected, parts):
    """The parts of parts.csv with the claims of expected.csv. A line that cannot be read ends the program with its
    number."""
    all_ = {}
    with open(parts, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            part = Part(**{**row, "repeats": int(row["repeats"]), "needs": tuple(row["needs"].split())})
            all_[part.anchor] = part
    with open(expected, newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        for row in rows:
            try:
                for column in ("low", "high", "paper_low", "paper_high"):
                    row[column] = float(row[column]) if row[column] else None
                claim = Claim(**row, line=rows.line_num)
                if claim.how not in HOW or claim.low is None or claim.high < claim.low:
                    raise ValueError(f"how is '{claim.how}', the range {claim.low} to {claim.high}")
                if bool(claim.paper) != bool(claim.page) or claim.comparable and not claim.paper:
                    raise ValueError("a published figure needs the page where it was read")
                conditions(claim.cell)
                all_[claim.experiment].claims.append(claim)
            except (KeyError, TypeError, ValueError) as error:
                raise SystemExit(f"{expected}:{rows.line_num}: {error}")
    return list(all_.values())


PARTS = load(os.path.join(HERE, "expected.csv"), os.path.join(HERE, "parts.csv"))
