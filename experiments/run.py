#!/usr/bin/env python3
"""Runs experiments, keeps their results, and compares them with the expected ranges. It needs only the standard library.

    run.py run [NAME...]      measure what is missing (without a name: everything that this machine can run)
    run.py check              the same, then print the evidence for every claim (--no-run: only that). Without names it also prints
                              the state of every table of the notes and papers (tables.py). It fails if a result differs and
                              no reason is given.
    run.py readme             rewrite CLAIMS.md, ranges.csv, the table in experiments/README.md and the last column of the table of
                              ideas in README.md (--check: only say whether they are up to date). It refuses a range that was changed after a run without an amendment.
    run.py log                print the spans of offload_cost/trace as an event log (disagg/request_trace.h) for `xpyd trace FILE`: steps
                              as steps, copies as transfers
    run.py list               print names, devices, the minutes that each last run took, and their sum
    run.py sources            print the sources stamp of each result file as JSON, for a bundle without sources

A point that is already in the result file is not measured again. Each file is stamped with hashes of the sources that it
depends on (sources.py), the machine and the seed. A file with another stamp is set aside, never overwritten.
"""
import argparse
import concurrent.futures
import contextlib
import csv
import fcntl
import functools
import glob
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
SHOWN = 20  # rows of a result that are printed when it is measured
sys.path.insert(0, HERE)

from claims import CLAIMS, FRONT_PAGE  # noqa: E402
from evidence import VERDICTS, Evidence, decide  # noqa: E402
from sources import Sources, changed  # noqa: E402
from table import Table, TableError, point_hash  # noqa: E402
from tables import by, rows_of, states  # noqa: E402

ETCD = os.path.join(ROOT, "build/etcd/usr/bin") + os.pathsep + os.environ.get("PATH", "")
BEGIN, END = "<!-- made by `experiments/run.py readme`: -->", "<!-- end -->"


sources_below = functools.lru_cache(Sources)


def sources_stamp(root, claim):
    """The hash of everything that the experiment's result depends on."""
    kept = os.path.join(root, "experiments", "sources.json")  # a bundle (make gpu-bundle) has no sources
    if os.path.exists(kept):
        with open(kept, encoding="utf-8") as file:
            return json.load(file)[claim.file]
    return sources_below(root, claim.device).stamp(claim.name)


class Progress:
    """One progress line, redrawn on a terminal. Elsewhere it prints nothing."""

    def __init__(self, label, done, total):
        self.label, self.done, self.total, self.first = label, done, total, done
        self.start = time.monotonic()
        self.shown = sys.stderr.isatty()

    def step(self, note=""):
        if not self.shown:
            return
        filled = 24 * self.done // max(1, self.total)
        line = f"{self.label} [{'#' * filled}{'.' * (24 - filled)}] {self.done}/{self.total}"
        if self.done > self.first:
            left = (time.monotonic() - self.start) / (self.done - self.first) * (self.total - self.done)
            line += f" {left / 60:.1f} min left"
        width = os.get_terminal_size(sys.stderr.fileno()).columns
        sys.stderr.write("\r\033[K" + f"{line} {note}"[:width - 1])
        sys.stderr.flush()

    def clear(self):
        if self.shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


class Program:
    """One process `xpyd_experiments run NAME`, which is asked point by point. If a point ends it, it is started again."""

    def __init__(self, runner, claim):
        self.words = [runner.options.bin, "run", claim.name, *runner.settings(claim)]
        self.process, self.log, self.counted = None, None, None
        if claim.callgrind:
            self.counted = tempfile.NamedTemporaryFile(prefix="callgrind.")
            self.words = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={self.counted.name}", *self.words]

    def ask(self, parameters):
        if self.process is None:
            self.log = tempfile.TemporaryFile("w+")
            self.process = subprocess.Popen(self.words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=self.log, text=True)
        try:
            self.process.stdin.write(json.dumps(parameters) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line.endswith("\n"):
            reply = json.loads(line)
            if self.counted and "rows" in reply:
                self.close()  # callgrind writes its count when the process ends
                with open(self.counted.name) as file:
                    count = re.search(r"^totals: (\d+)", file.read(), re.M)
                reply["rows"] = [{**row, "instructions": int(count.group(1))} for row in reply["rows"]]
            return reply
        code = self.process.wait()
        self.log.seek(0)
        last = self.log.read().strip().split("\n")[-1].replace("xpyd_experiments: ", "")
        self.close()
        return {"error": f"the program ended with code {code}: {last}"}

    def close(self):
        if self.process:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()
            self.log.close()
            self.process = None


class Runner:
    def __init__(self, options):
        self.options = options
        self.machine = None
        self.peaks = {}

    def call(self, *words):
        """Runs the program to its end. Returns (exit code, stdout, last line of stderr)."""
        try:
            done = subprocess.run([self.options.bin, *words], cwd=ROOT, capture_output=True, text=True)
        except OSError as error:
            raise SystemExit(f"run.py: {self.options.bin}: {error.strerror}: `make experiments` builds it")
        last = done.stderr.strip().split("\n")[-1].replace("xpyd_experiments: ", "")
        return done.returncode, done.stdout, last

    def answer(self, *words):
        code, out, error = self.call(*words)
        if code != 0:
            raise SystemExit(f"run.py: {' '.join(words)}: {error}")
        return json.loads(out)

    def missing(self, claim):
        """Why this machine cannot run the claim; "" if it can."""
        self.machine = self.machine or self.answer("machine")
        if claim.device == "cuda" and self.machine["cuda_missing"]:
            return self.machine["cuda_missing"]
        if claim.callgrind and not shutil.which("valgrind"):
            return "it needs valgrind to count instructions"
        if claim.rdma and not glob.glob("/sys/class/infiniband/*"):
            return "it needs an RDMA device: `make check STAGE=rdma` runs it in a virtual machine that has one"
        if claim.netns and (os.geteuid() or not all(map(shutil.which, ("ip", "tc"))) or not shutil.which("etcd", path=ETCD)):
            return "it needs root, iproute2 and etcd: `make check STAGE=netns` installs the last two"
        return "it needs the Mooncake traces; --traces names their folder" if (
            claim.traces and not self.options.traces) else ""

    def settings(self, claim):
        words = ["--device", claim.device, "--seed", str(self.options.seed)]
        if self.options.traces:
            words += ["--traces", self.options.traces]
        return words + (["--tiny"] if self.options.tiny else [])

    def stamp(self, claim):
        """(stamp that two comparable results must share, further facts for the reader)."""
        self.missing(claim)
        must = {
            "experiment": claim.name,
            "device": claim.device if claim.device == "cpu" else self.machine["cuda"],
            "machine": self.machine["machine"],
            "sources": sources_stamp(ROOT, claim),
            "seed": str(self.options.seed),
            "sizes": "tiny" if self.options.tiny else "full",
        }
        return must, {"commit": self.machine["commit"], "build": self.machine["build"]}

    def path(self, claim):
        return os.path.join(self.options.results, claim.file)

    def stale(self, claim, table):
        """Why the file does not belong to these sources on this machine; "" if it does."""
        must, _ = self.stamp(claim)
        for key, value in must.items():
            if table.stamp.get(key, "?") != value:
                if key == "sources":
                    return f"measured at commit {table.stamp['commit']}, {changed(table.stamp['sources'], value)}"
                return f"measured with {key} '{table.stamp.get(key, '?')}', here it is '{value}'"
        return ""

    def open(self, claim):
        """The table to continue. A file that cannot be continued is set aside first."""
        path = self.path(claim)
        if os.path.exists(path):
            try:
                table = Table.load(path)
                why = self.stale(claim, table)
                for trouble in table.troubles:
                    print(f"  {trouble}; that point is measured again")
                if not why:
                    return table
            except TableError as error:
                why = str(error)
            kept = os.path.join(ROOT, "build", "experiments", "set-aside")
            os.makedirs(kept, exist_ok=True)
            aside, number = os.path.join(kept, time.strftime("%Y%m%d-%H%M%S-") + claim.file), 0
            while os.path.exists(aside):
                number += 1
                aside = os.path.join(kept, time.strftime("%Y%m%d-%H%M%S-") + f"{number}-{claim.file}")
            os.replace(path, aside)
            print(f"  {claim.file}: {why}; moved to {os.path.relpath(aside, ROOT)}")
        must, more = self.stamp(claim)
        if claim.device not in self.peaks:
            self.peaks[claim.device] = json.dumps(self.answer("peak", "--device", claim.device))
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Table(path, {**must, **more, "peaks": self.peaks[claim.device], "begun": date})

    def plan(self, claim):
        """[(hash, repetition, parameters)]: all points once, then all again, so that the configurations take turns."""
        points = self.answer("points", claim.name, *self.settings(claim))
        repeats = min(claim.repeats, self.options.repeats or claim.repeats)
        return [(point_hash(claim.name, claim.device, self.options.seed, self.options.tiny, p), r, p)
                for r in range(repeats) for p in points]

    def run(self, claim):
        """Measures what is missing. Returns True if the result is then complete."""
        why = self.missing(claim)
        if why:
            print(f"{claim.name} ({claim.device}): not run: {why}")
            return False
        plan = self.plan(claim)
        table = self.open(claim)
        done = table.done()
        todo = [unit for unit in plan if unit[:2] not in done]
        table.stamp.pop("failed", None)
        begin, spent = time.monotonic(), float(table.stamp.get("seconds", 0))
        busy = resource.getrusage(resource.RUSAGE_CHILDREN)
        failures = []
        progress = Progress(claim.name, len(plan) - len(todo), len(plan))
        mine, programs = threading.local(), []

        def ask(unit):
            if not hasattr(mine, "program"):
                mine.program = Program(self, claim)
                programs.append(mine.program)
            return mine.program.ask(unit[2])

        # A claim that reads no clock of this machine runs in as many processes as there are cores; a timed claim runs in one.
        timed = any(claim.how_of(e) == "measured" for e in claim.expect)
        pool = concurrent.futures.ThreadPoolExecutor(1 if timed else len(os.sched_getaffinity(0)))
        replies = (pool.submit(ask, unit).result() for unit in todo) if timed else pool.map(ask, todo)
        for (hash_, repeat, parameters), reply in zip(todo, replies):
            progress.done += 1
            progress.step(" ".join(f"{k}={v}" for k, v in parameters.items()))
            if "rows" in reply:
                table.stamp["seconds"] = f"{spent + time.monotonic() - begin:.0f}"
                table.add(hash_, repeat, [{**parameters, **row} for row in reply["rows"]])
                continue
            failures.append(f"{json.dumps(parameters)}: {reply['error']}")
            table.stamp["failed"] = failures[0]
            table.write()
        pool.shutdown()
        for program in programs:
            program.close()
        if todo and not timed:  # the CPU time spread over idle cores, however busy they were
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = ended.ru_utime + ended.ru_stime - busy.ru_utime - busy.ru_stime
            table.stamp["seconds"] = f"{spent + cpu / len(os.sched_getaffinity(0)):.0f}"
            table.write()
        progress.clear()
        for failure in failures:
            print(f"  {claim.name}: {failure}")
        print(f"{claim.name} ({claim.device}): {len(plan) - len(failures)} of {len(plan)} points in "
              f"{os.path.relpath(self.path(claim), ROOT)}, {len(todo)} measured now in {time.monotonic() - begin:.0f} s")
        if len(table.rows) <= SHOWN:
            print(table.text())
        return not failures


def minutes(results, claim):
    """Minutes that the last run took on two idle cores, from its stamp; None if there was no run."""
    try:
        return float(Table.load(os.path.join(results, claim.file)).stamp["seconds"]) / 60
    except (TableError, KeyError):
        return None


def took(results, claim):
    known = minutes(results, claim)
    return "never run" if known is None else f"{known:.1f} minutes" if known >= 0.1 else f"{60 * known:.0f} seconds"


def evidence(claim, table):
    """[(expectation, Evidence)] of a claim, from the rows of its result file alone."""
    found = []
    for e in claim.expect:
        try:
            numbers = [e.value(part) for part in table.samples()]
            if not numbers:
                raise TableError(f"{table.path}: the file has no rows")
            found.append((e, decide(numbers, e.low, e.high, e.paper)))
        except (TableError, ZeroDivisionError) as error:
            found.append((e, Evidence("not run", trouble=str(error).replace(os.path.dirname(table.path) + os.sep, ""))))
    return found


def seen(e, found):
    """The median, its interval and the number of samples, as text."""
    if found.n == 0:
        return ""
    text = e.show(found.middle)
    if found.n > 1 and found.low != found.high:
        text += f" [{e.range(found.low, found.high)}]"
    return text + (f", n {found.n}" if found.n > 1 else "")


def unexplained(e, found):
    """Whether the result differs and the claim gives no reason."""
    return found.paper == "differs" and not e.differs or found.arithmetic == "differs" and not (found.paper and e.differs)


def verdict(runner, claim):
    """(state of the result file, [(expectation, Evidence)]) of one claim, from its result file alone."""
    path = runner.path(claim)
    missing = runner.missing(claim)
    if not os.path.exists(path):
        return missing or f"no {claim.file}: `{claim.command}`", []
    try:
        table = Table.load(path)
    except TableError as error:
        return f"{error}: `{claim.command}`", []
    notes = list(table.troubles)
    if "failed" in table.stamp:
        notes.append(f"failed: {table.stamp['failed']}")
    if missing:
        notes.append(f"on {table.stamp['device']}, commit {table.stamp['commit']}; here: {missing}")
    else:
        stale = runner.stale(claim, table)
        notes += [f"stale: {stale}"] if stale else []
        if not stale:
            left = len([u for u in runner.plan(claim) if u[:2] not in table.done()])
            notes += [f"{left} points are still missing"] if left else []
    return "; ".join(notes), evidence(claim, table)


def check(runner, claims):
    """Prints the evidence for every claim. Returns True if nothing failed and every difference has a reason."""
    counts, good, due, every = {}, True, [], {}
    for claim in claims:
        state, found = verdict(runner, claim)
        print(f"\n{claim.name} ({claim.device})" + (f": {state}" if state else ""))
        print(f"  {claim.question}\n  {claim.source}; {claim.command}; {claim.file}")
        if ("stale" in state or "missing" in state or not found) and not runner.missing(claim):
            due.append(claim)
        good &= "failed: " not in state
        found = found or [(e, Evidence("not run")) for e in claim.expect]
        every.update(keyed(claim, found))
        for e, one in found:
            counts[one.verdict] = counts.get(one.verdict, 0) + 1
            print(f"    {one.words():24} {e.label}: {seen(e, one) or one.trouble or 'no result'}"
                  f" ({claim.how_of(e)}; arithmetic {e.range(e.low, e.high)}" + (f"; paper {e.paper.text})" if e.paper else ")"))
            if unexplained(e, one):
                good = False
                print("      the claim gives no reason for the difference")
    print("\n" + "; ".join(f"{word}: {counts[word]}" for word in VERDICTS if word in counts))
    def sum_of(some):
        return f"{sum(minutes(runner.options.results, c) or 0 for c in some):.0f} minutes"
    print(f"the last runs of these claims took {sum_of(c for c in claims if not runner.missing(c))}; to be measured, because they are stale or missing: "
          + (", ".join(f"{c.name} ({took(runner.options.results, c)})" for c in due) or "nothing") + (": " + sum_of(due) if due else ""))
    if len(claims) == len(CLAIMS):
        print(tables_in_words(every))
    return good


def keyed(claim, found):
    """{`experiment: label`: (Claim, Expect, Evidence)}, the form that tables.py reads."""
    return {f"{claim.anchor}: {e.label}": (claim, e, one) for e, one in found}


def tables_in_words(found):
    """Every table and figure of the notes and papers, the experiments that rebuild it, and its state, as text."""
    all_, counts = states(found)
    out, of = ["\ntables and figures of the notes and papers:"], ""
    for row, word, notes in all_:
        if row.of != of:
            of = row.of
            out.append(f"  {of}")
        how = ", ".join(by(row, found)) or row.command
        out.append(f"    {word:12} {row.name}: {row.shows}" + (f" ({how})" if how else "") + (f". {notes}" if notes else ""))
    return "\n".join([*out, counts])


def tables_page(found):
    """The same list as a section of CLAIMS.md."""
    all_, counts = states(found)
    out = [f"\n## Tables and figures of the notes and papers\n\n{counts}.\n", "| of | what | shows | state | by | how, why, and what is not here |", "|---|---|---|---|---|---|"]
    for row, word, notes in all_:
        how = ", ".join(f"[{name}](#{name})" for name in by(row, found)) or (f"`{row.command}`" if row.command else "")
        out.append("| " + " | ".join(cell(text) for text in (row.of, row.name, row.shows, word, how, notes)) + " |")
    return "\n".join(out)


def cell(text):
    return text.replace("|", "\\|").replace("\n", " ")


def published(e):
    if not e.paper:
        return ""
    text = e.paper.text + e.paper.known()
    if e.paper.comparable() and (e.paper.low, e.paper.high) != (e.low, e.high):
        text += f" (the same: {e.range(e.paper.low, e.paper.high)})"
    return text


def results(runner):
    """[(claim, table or None, [(expectation, Evidence)])] of all claims."""
    all_ = []
    for claim in CLAIMS:
        try:
            table = Table.load(os.path.join(runner.options.results, claim.file))
            all_.append((claim, table, evidence(claim, table)))
        except TableError:
            all_.append((claim, None, [(e, Evidence("not run")) for e in claim.expect]))
    return all_


def claims_page(runner):
    """The text of CLAIMS.md."""
    all_ = results(runner)
    out = [PAGE_HEAD, tables_page({key: value for claim, _, found in all_ for key, value in keyed(claim, found).items()})]
    for claim, table, found in all_:
        out.append(f"\n## {claim.anchor}\n\n{claim.question}\n")
        where = f"`{claim.command}`, {took(runner.options.results, claim)}"
        if table:
            device = table.stamp["machine"] if claim.device == "cpu" else table.stamp["device"]
            where += (f". [results/{claim.file}](results/{claim.file}): {device}, commit {table.stamp['commit']}, "
                      f"{table.stamp.get('begun', '?')[:10]}")
        else:
            where += ". Not run: " + ("no result" if claim.device == "cpu" else "no CUDA device")
        out.append(f"{claim.source}. {where}.\n")
        out.append("| | of | ours | how | paper | our arithmetic | verdict |\n|---|---|---|---|---|---|---|")
        notes = []
        for e, one in found:
            mark = ""
            why = []
            if "differs" in (one.paper, one.arithmetic) and e.differs:
                why.append(f"differs: {e.differs}")
            if e.amended:
                why.append(f"amended {e.amended}" + (f", was {e.range(*e.was)}" if e.was else "") + f": {e.reason}")
            if one.trouble:
                why.append(one.trouble)
            if why:
                notes.append(". ".join(why))
                mark = f" <sup>{len(notes)}</sup>"
            range_ = e.range(e.low, e.high) + (", amended" if e.amended else "")
            of = ", ".join(f"{row.of}, {row.name}" for row in rows_of(f"{claim.anchor}: {e.label}"))
            out.append("| " + " | ".join(cell(text) for text in (
                e.label, of, seen(e, one), claim.how_of(e), published(e), range_, f"{one.words()}{mark}")) + " |")
        if notes:
            out.append("\n" + "\n".join(f"{number}. {note}." for number, note in enumerate(notes, 1)))
    return "\n".join(out) + "\n"


PAGE_HEAD = """# Claims, one by one

`experiments/run.py readme` makes this page from [claims.py](claims.py), [tables.py](tables.py) and the [results](results).
[README.md](README.md#how-to-read-a-verdict) explains the verdicts. The column *of* names the table or figure to which a claim belongs. If
it is empty, we know of none that prints the claim."""


def readme_table(runner):
    """The table of README.md: one row an experiment, with all its parts."""
    all_ = results(runner)
    total = {word: sum(one.verdict == word for _, _, found in all_ for _, one in found) for word in VERDICTS}
    rows = ["**" + f"{sum(total.values())} claims. " + "; ".join(f"{word}: {total[word]}" for word in VERDICTS if total[word]) + ".**\n",
            "| experiment | question | how | = paper | ≠ paper | = arithmetic | ≠ arithmetic | undecided | not run |",
            "|---|---|---|---:|---:|---:|---:|---:|---:|"]
    for experiment in dict.fromkeys(claim.experiment for claim, _, _ in all_):
        parts = [(claim, found) for claim, _, found in all_ if claim.experiment == experiment]
        how = ", ".join(dict.fromkeys(claim.how_of(e) for claim, found in parts for e, _ in found))
        counts = [sum(one.verdict == word for _, found in parts for _, one in found) for word in VERDICTS]
        more = ", ".join(f"[{claim.anchor[len(experiment) + 1:]}](CLAIMS.md#{claim.anchor})" for claim, _ in parts[1:])
        rows.append(f"| [{experiment}](CLAIMS.md#{parts[0][0].anchor})" + (f"; {more}" if more else "") +
                    f" | {cell(parts[0][0].question)} | {how} | " + " | ".join(str(n) if n else "" for n in counts) + " |")
    return "\n".join(rows)


def front_page(runner, text):
    """The text of the root README with the last column of its table of ideas: our value of FRONT_PAGE's claim, and the paper's."""
    found = {key: of for claim, _, evidence_ in results(runner) for key, of in keyed(claim, evidence_).items()}
    shown = []

    def row(match):
        anchor = match[2]
        label, words = FRONT_PAGE[anchor]
        claim, e, one = found[f"{anchor}: {label}"]
        shown.append(anchor)
        paper = {"agrees": "", "differs": " (differs)", "undecided": " (undecided)", "": ""}[one.paper]
        ours = e.show(one.middle) if one.n else "not run"
        return f"{match[1]}{words}, {claim.how_of(e)}: **{ours}**" + (f"; {cell(e.paper.text + e.paper.known())}{paper}" if e.paper else "") + " |"

    text = re.sub(r"^(\|(?:[^|\n]*\|){4} \[[^]]*\]\(experiments/CLAIMS\.md#([^)]*)\) \| ).*\|$", row, text, flags=re.M)
    if sorted(shown) != sorted(FRONT_PAGE):
        raise SystemExit(f"run.py: README.md: expected one row for each experiment of FRONT_PAGE; rows are {', '.join(shown)}")
    return text


def ranges_of(claims):
    """{(experiment, label): (low, high, amended)}, the content of ranges.csv."""
    return {(c.anchor, e.label): (str(e.low), str(e.high), e.amended) for c in claims for e in c.expect}


def unamended(old, claims):
    """Complaints about ranges that differ from `old`, for experiments that have run. A changed range must state its date, the
    range before, and why; a new claim among old ones must give its reason. An amendment must not be removed."""
    wrong, known = [], {experiment for experiment, _ in old}
    for claim in claims:
        for e in claim.expect:
            low, high, amended = old.get((claim.anchor, e.label), ("", "", ""))
            if (low, high) == (str(e.low), str(e.high)):
                good = e.amended >= amended
            elif low:
                good = e.reason and e.amended >= max(amended, "2") and tuple(map(str, e.was)) == (low, high)
            else:
                good = e.reason or claim.anchor not in known
            if not good:
                was = f"it was {low} to {high}" + (f", amended {amended}" if amended else "") if low else "it is new"
                wrong.append(f"{claim.anchor}: {e.label}: {was}: `amended`, `was` and `reason` must record the change")
    return wrong


def readme(runner, only_check):
    path = os.path.join(HERE, "README.md")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"run.py: {path}: expected the lines '{BEGIN}' and '{END}'")
    good = True
    kept = os.path.join(HERE, "ranges.csv")
    with open(kept, newline="", encoding="utf-8") as file:
        old = {tuple(row[:2]): tuple(row[2:]) for row in list(csv.reader(file))[1:]}
    wrong = unamended(old, [claim for claim, table, _ in results(runner) if table])
    if wrong:
        print("\n".join(["these ranges were changed after a run, but claims.py records no amendment:", *wrong]))
        return False
    new = io.StringIO()
    csv.writer(new, lineterminator="\n").writerows([("experiment", "label", "low", "high", "amended"),
                                                   *(key + value for key, value in ranges_of(CLAIMS).items())])
    front = os.path.join(HERE, "..", "README.md")
    with open(front, encoding="utf-8") as file:
        front_text = front_page(runner, file.read())
    pages = {front: front_text, path: f"{head}{BEGIN}\n\n{readme_table(runner)}\n\n{END}{tail}",
             os.path.join(HERE, "CLAIMS.md"): claims_page(runner), kept: new.getvalue()}
    for path, new in pages.items():
        name = os.path.relpath(path, ROOT)
        old = ""
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                old = file.read()
        if new == old:
            continue
        good = False
        if only_check:
            print(f"{name} is out of date; `experiments/run.py readme` rewrites it")
            continue
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(new)
        os.replace(path + ".new", path)
        print(f"{name}: written")
    return good or not only_check


def span_log(table):
    """Lines of an event log: the first round of the first sample of offload_cost/trace. Each part becomes an instance."""
    first = table.samples()[0]
    lines = [{"xpyd_event_log": 1, "options": {}}]
    for number, row in enumerate(first.select(round=first.distinct("round")[0])):
        begin, end = (float(row[column]) / 1e3 for column in ("begin_ms", "end_ms"))
        part, of = row["part"], {"t": begin, "seconds": end - begin, "tokens": int(row["tokens"])}
        if row["what"] == "step":
            lines.append({"e": "step", "instance": part, "steps": 1, **of})
        else:
            source, destination = (part, "host") if row["what"] == "out" else ("host", part)
            lines.append({"e": "transfer", "from": source, "to": destination, "request": number, **of})
    return "\n".join(map(json.dumps, lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "check", "readme", "log", "list", "sources"])
    parser.add_argument("names", nargs="*", help="experiments; none: all")
    parser.add_argument("--bin", default="build/release/xpyd_experiments", help="path of xpyd_experiments, the program that measures")
    parser.add_argument("--results", default=os.path.join(HERE, "results"), help="folder of the CSVs")
    parser.add_argument("--device", default="", help="only claims of this device: cpu or cuda")
    parser.add_argument("--repeats", type=int, default=0, help="at most this many repetitions; 0: as many as the claim says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", default="../shared/traces", help="folder of the Mooncake traces")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a test")
    parser.add_argument("--no-run", action="store_true", help="check: measure nothing, compare the results that exist")
    parser.add_argument("--check", action="store_true", help="readme: write nothing, only name the files that are out of date")
    options = parser.parse_args()
    options.bin = os.path.abspath(os.path.join(ROOT, options.bin))
    if not os.path.isdir(os.path.join(ROOT, options.traces)):
        options.traces = ""
    names = {claim.experiment for claim in CLAIMS} | {claim.name for claim in CLAIMS}
    for name in options.names:
        if name not in names:
            raise SystemExit(f"run.py: no experiment '{name}'; there are {', '.join(sorted(names))}")
    claims = [c for c in CLAIMS if (not options.names or {c.name, c.experiment} & set(options.names))
              and options.device in ("", c.device)]
    runner = Runner(options)
    if options.command == "list":
        for c in claims:
            print(f"{c.name:20} {c.device:5} {took(options.results, c):13} {c.question}")
        print(f"{'':26} {sum(minutes(options.results, c) or 0 for c in claims):.1f} minutes")
        return 0
    if options.command == "sources":
        print(json.dumps({c.file: sources_stamp(ROOT, c) for c in CLAIMS}, indent=1))
        return 0
    if options.command == "log":
        print(span_log(Table.load(os.path.join(options.results, "offload_cost-trace.csv"))))
        return 0
    if options.command == "readme":
        return 0 if readme(runner, options.check) else 1
    os.makedirs(options.results, exist_ok=True)
    good = True
    if options.command == "run" or not options.no_run:
        with open(os.path.join(options.results, ".lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SystemExit(f"run.py: another run is writing to {options.results}")
            left_out = [f"  {claim.name} ({claim.device}): {runner.missing(claim)}" for claim in claims if runner.missing(claim)]
            if left_out:
                print("\n".join(["not run, because this machine cannot run them:", *left_out]), flush=True)
            for claim in claims:
                good &= runner.run(claim) or bool(runner.missing(claim))
    if options.command == "check":
        good = check(runner, claims)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nrun.py: interrupted. Every finished point is kept; the same command continues", file=sys.stderr)
        sys.exit(130)
