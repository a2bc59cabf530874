"""What papers claim, what arithmetic expects, and which experiment looks: one row an experiment.

The table of README.md and `make check-claims` both come from here. Ranges were written down before the first
run, from the source named or from the arithmetic at the head of the experiment's .cc file. An expectation is a
function of a result file; it is asked once per repetition, and its median is compared.
"""
from dataclasses import dataclass, field
from typing import Callable


@dataclass
class Expect:
    label: str
    value: Callable  # Table of one repetition -> number
    low: float
    high: float
    unit: str = ""  # "%": the number is a share
    paper: str = ""  # the published figure

    def show(self, number):
        if self.unit == "%":
            return f"{100 * number:.3g} %"
        return f"{number:.3g}" + (f" {self.unit}" if self.unit else "")

    def range(self):
        text = f"{self.show(self.low)} to {self.show(self.high)}"
        return f"{self.label}: {text}" + (f" (paper: {self.paper})" if self.paper else "")


@dataclass
class Claim:
    name: str  # of the experiment; result file NAME.csv, on a GPU NAME-cuda.csv
    question: str
    source: str
    minutes: float  # of `make exp-NAME` on two cores
    expect: list
    device: str = "cpu"
    repeats: int = 1  # 1 where nothing is timed and a repetition would give the same numbers
    why: str = ""  # known reason why the range is missed
    traces: bool = False  # needs the Mooncake traces

    @property
    def file(self):
        return self.name + ("" if self.device == "cpu" else f"-{self.device}") + ".csv"

    @property
    def command(self):
        return f"make exp-{self.name}" + ("" if self.device == "cpu" else f" DEVICE={self.device}")


# Every configuration computed the same logits for the same requests.
ONE_HASH = Expect("different logits hashes", lambda t: len({row["logits_hash"] for row in t.select()}), 1, 1)


def at(table, column, topology, transport="local", load=.4, **where):
    """One cell of the P/D table."""
    return table(column, topology=topology, transport=transport, load=load, **where)


CLAIMS = [
    Claim(
        "waste",
        "How much of a full KV pool holds KV, in slots of the maximum length and in blocks of 1 to 256 tokens; and "
        "how many sequences fit?",
        "PagedAttention (SOSP'23) Fig. 2, Fig. 13a, section 6.2",
        0.5,
        [
            Expect("useful, slots", lambda t: t("useful_share", dataset="sharegpt", allocator="contiguous"),
                   .15, .382, "%", "20.4 % Orca (Max) to 38.2 % Orca (Oracle)"),
            Expect("useful, blocks of 16", lambda t: t("useful_share", dataset="sharegpt", block=16),
                   .95, .99, "%", "96.3 %"),
            Expect("batch, blocks of 16 / slots", lambda t: t("batch_mean", dataset="sharegpt", block=16) /
                   t("batch_mean", dataset="sharegpt", block=0), 3.5, 5.5, "x", "4.3 x"),
            Expect("internal + reserved, blocks of 256", lambda t: t("internal_share", dataset="sharegpt", block=256) +
                   t("reserved_share", dataset="sharegpt", block=256), .15, .29, "%"),
            Expect("useful, slots, Mooncake", lambda t: t("useful_share", dataset="mooncake", block=0), .06, .14, "%"),
            Expect("useful, blocks of 16, Mooncake", lambda t: t("useful_share", dataset="mooncake", block=16),
                   .95, .99, "%"),
        ],
    ),
    Claim(
        "break_even",
        "At what bandwidth is fetching the KV of a prefix faster than computing it again?",
        "Mooncake (FAST'25) section 2.2, equations 1 and 2",
        0.1,
        [
            Expect("8 x A800, 8,192 tokens, their constants", lambda t: t("paper_gbps", machine="8xA800", prefix=8192),
                   5.5, 6.5, "GB/s", "6 GB/s"),
            Expect("8 x H800, 8,192 tokens, their constants", lambda t: t("paper_gbps", machine="8xH800", prefix=8192),
                   18, 19.5, "GB/s", "19 GB/s"),
            Expect("8 x A800, 8,192 tokens, the model's widths", lambda t: t("gbps", machine="8xA800", prefix=8192),
                   5.2, 6.2, "GB/s"),
            Expect("the model's widths / their constants, 1M tokens",
                   lambda t: t("gbps", machine="8xA800", prefix=1 << 20) /
                   t("paper_gbps", machine="8xA800", prefix=1 << 20), 1.8, 2.1, "x"),
        ],
    ),
    Claim(
        "batching",
        "What does iteration-level batching do to throughput, and chunked prefill to the gaps between tokens?",
        "Orca (OSDI'22) section 6; Sarathi-Serve (OSDI'24) section 4.2",
        5,
        [
            Expect("P99 gap at load 0.6, prefill_first / chunked", lambda t: t("p99_itl_ms", policy="prefill_first", load=.6) /
                   t("p99_itl_ms", policy="chunked", load=.6), 2, 12, "x"),
            Expect("mean TTFT at load 0.6, static / prefill_first", lambda t: t("mean_ttft_ms", policy="static", load=.6) /
                   t("mean_ttft_ms", policy="prefill_first", load=.6), 2, 100, "x"),
            Expect("tokens/s all at once, prefill_first / static", lambda t: t("output_throughput", policy="prefill_first", load=0.) /
                   t("output_throughput", policy="static", load=0.), 1.05, 1.6, "x"),
            Expect("tokens/s all at once, chunked / prefill_first", lambda t: t("output_throughput", policy="chunked", load=0.) /
                   t("output_throughput", policy="prefill_first", load=0.), .8, 1.15, "x"),
            ONE_HASH,
        ],
        repeats=3,
    ),
    Claim(
        "chunk",
        "What does the size of a prefill chunk do to the gaps between tokens, and to the first token?",
        "Sarathi-Serve (OSDI'24) section 4.3 (token budgets 512 and 2048)",
        4,
        [
            Expect("P99 gap, chunks of 512 / 64", lambda t: t("p99_itl_ms", chunk=512) / t("p99_itl_ms", chunk=64), 3, 9, "x"),
            Expect("median TTFT, chunks of 32 / 512", lambda t: t("median_ttft_ms", chunk=32) / t("median_ttft_ms", chunk=512),
                   1.05, 2.5, "x"),
            ONE_HASH,
        ],
        repeats=3,
    ),
    Claim(
        "chunk",
        "The same on a card, Llama-3.1-8B's shape in bf16.",
        "Sarathi-Serve (OSDI'24) section 4.3",
        4,
        [
            Expect("P99 gap, chunks of 2048 / 512", lambda t: t("p99_itl_ms", chunk=2048) / t("p99_itl_ms", chunk=512), 2, 4.5, "x"),
            Expect("P99 gap, chunks of 512", lambda t: t("p99_itl_ms", chunk=512), 10, 60, "ms"),
            ONE_HASH,
        ],
        device="cuda",
    ),
    Claim(
        "pd",
        "Colocated, 1P1D or 2P1D on the same two cores: TTFT and TBT against load?",
        "DistServe (OSDI'24) section 2; the xPyD notes' table",
        8,
        [
            Expect("P99 ITL at load 0.4, 1P1D / 1C", lambda t: at(t, "p99_itl_ms", "1P1D") / at(t, "p99_itl_ms", "1C"), .04, .5, "x"),
            Expect("median TTFT at load 0.4, 1P1D / 1C", lambda t: at(t, "median_ttft_ms", "1P1D") / at(t, "median_ttft_ms", "1C"),
                   1.2, 3.5, "x"),
            Expect("median TTFT at load 0.4, 2P1D / 1P1D", lambda t: at(t, "median_ttft_ms", "2P1D") / at(t, "median_ttft_ms", "1P1D"),
                   .6, 1.7, "x"),
            Expect("median TTFT at load 0.2, handoff / local", lambda t: at(t, "median_ttft_ms", "1P1D", transport="handoff", load=.2) /
                   at(t, "median_ttft_ms", "1P1D", load=.2), .85, 1.1, "x"),
            ONE_HASH,
        ],
        repeats=3,
    ),
    Claim(
        "pd",
        "P and D on one card, by stream priority and by SM partition (plan G1, G2, G5): TTFT and TBT against load?",
        "scheduling plan G0-G5; an independent report on an RTX 5090 with Qwen3-4B",
        8,
        [
            Expect("P99 ITL at load 0.6, 96 SMs for P / 1C with chunks of 2048", lambda t: at(t, "p99_itl_ms", "1P1D", split="96", load=.6) /
                   at(t, "p99_itl_ms", "1C", chunk=2048, load=.6), .15, .7, "x", "0.45 to 0.47"),
            Expect("median TTFT at load 0.6, 96 SMs for P / 1C with chunks of 2048",
                   lambda t: at(t, "median_ttft_ms", "1P1D", split="96", load=.6) /
                   at(t, "median_ttft_ms", "1C", chunk=2048, load=.6), 1, 4, "x", "1.4 to 4.0"),
            Expect("P99 ITL at load 0.6, priority / 1C with chunks of 2048",
                   lambda t: at(t, "p99_itl_ms", "1P1D", split="priority", transport="local", load=.6) /
                   at(t, "p99_itl_ms", "1C", chunk=2048, load=.6), .1, 1.05, "x", "1.0"),
            Expect("median TTFT at load 0.3, handoff / local", lambda t: at(t, "median_ttft_ms", "1P1D", split="priority", transport="handoff", load=.3) /
                   at(t, "median_ttft_ms", "1P1D", split="priority", load=.3), .8, 1.05, "x"),
            ONE_HASH,
        ],
        device="cuda",
    ),
    Claim(
        "prefix",
        "What is a shared prefix worth: tokens found in the cache, and the first token's time?",
        "vLLM's automatic prefix caching; Mooncake (FAST'25) Fig. 14",
        2,
        [
            Expect("tokens found, 75 % shared", lambda t: t("hit_share", cache="on", share=.75), .68, .695, "%"),
            Expect("TTFT, 75 % shared / nothing shared", lambda t: t("ttft_ms", cache="on", share=.75) / t("ttft_ms", cache="on", share=0.),
                   .18, .38, "x"),
            Expect("TTFT, 94 % shared / nothing shared", lambda t: t("ttft_ms", cache="on", share=.9375) /
                   t("ttft_ms", cache="on", share=0.), .05, .2, "x", "0.14 at 95 % of 128K tokens"),
            Expect("TTFT, 75 % shared, cache off / nothing shared", lambda t: t("ttft_ms", cache="off", share=.75) /
                   t("ttft_ms", cache="on", share=0.), .85, 1.2, "x"),
            Expect("logits hashes with and without cache", lambda t: len({row["logits_hash"] for row in t.select(share=.75)}), 1, 1),
        ],
        repeats=3,
    ),
    Claim(
        "prefix_repetition",
        "How much do the prompts of Mooncake's traces repeat?",
        "xPyD notes, radix tree with N and L; Mooncake (FAST'25) Table 2",
        .1,
        [
            Expect("R_leaf, conversation, N 2", lambda t: t("r_leaf", trace="conversation", min_count=2, min_length=0), .193, .195),
            Expect("R_conv, conversation, N 2", lambda t: t("r_conv", trace="conversation", min_count=2, min_length=0), .416, .418),
            Expect("R_conv, conversation, N 100", lambda t: t("r_conv", trace="conversation", min_count=100, min_length=0), 1, 1),
            Expect("tokens an unlimited cache finds, conversation",
                   lambda t: t("token_reuse", trace="conversation", min_count=2, min_length=0), .36, .41, "%", "40 %"),
            Expect("tokens an unlimited cache finds, synthetic",
                   lambda t: t("token_reuse", trace="synthetic", min_count=2, min_length=0), .64, .67, "%", "66 %"),
        ],
        traces=True,
    ),
    Claim(
        "paged_attention",
        "What does a block table cost attention, the same kernel over both memories?",
        "vAttention (ASPLOS'25) Figs 2, 3, 8; PagedAttention (SOSP'23) Fig. 18",
        1.5,
        [
            Expect("decode, blocks of 16 / contiguous", lambda t: t("ms", phase="decode", block=16) / t("ms", phase="decode", block=0),
                   .9, 1.15, "x", "equal (Fig. 8)"),
            Expect("decode, blocks of 1 / contiguous", lambda t: t("ms", phase="decode", block=1) / t("ms", phase="decode", block=0),
                   .95, 1.6, "x"),
            Expect("decode, blocks of 256 / blocks of 16", lambda t: t("ms", phase="decode", block=256) / t("ms", phase="decode", block=16),
                   .85, 1.1, "x", "up to 1.9 for 128 (Fig. 3, bytes grow with the block)"),
            Expect("prefill, blocks of 16 / contiguous", lambda t: t("ms", phase="prefill", block=16) / t("ms", phase="prefill", block=0),
                   .9, 1.1, "x", "up to 1.42 (Fig. 2)"),
        ],
        repeats=3,
    ),
    Claim(
        "paged_attention",
        "The same on a card: prompts of 1K to 32K, chunks behind 128K, decode of 1 to 32 x 16K.",
        "vAttention (ASPLOS'25) Figs 2, 3, 7, 8",
        2,
        [
            Expect("decode 32 x 16K, blocks of 16 / contiguous", lambda t: t("ms", phase="decode", batch=32, block=16) /
                   t("ms", phase="decode", batch=32, block=0), .97, 1.1, "x", "equal (Fig. 8)"),
            Expect("decode 16 x 16K, blocks of 128 / blocks of 16", lambda t: t("ms", phase="decode", batch=16, block=128) /
                   t("ms", phase="decode", batch=16, block=16), .9, 1.05, "x", "up to 1.9 (Fig. 3, bytes grow with the block)"),
            Expect("prefill 32K, blocks of 16 / contiguous", lambda t: t("ms", phase="prefill", context=32768, block=16) /
                   t("ms", phase="prefill", context=32768, block=0), .97, 1.15, "x", "up to 1.42 (Fig. 2)"),
            Expect("2,048 tokens behind 128K, blocks of 256 / contiguous", lambda t: t("ms", phase="chunk", context=131072, block=256) /
                   t("ms", phase="chunk", context=131072, block=0), .95, 1.12, "x", "1.24 (Fig. 7, 192K, whole prefill)"),
        ],
        device="cuda",
    ),
    Claim(
        "sm_curves",
        "How many SMs does each phase need, and what does the other take from it although the SMs are divided?",
        "scheduling plan G0, G3, G4",
        2,
        [
            Expect("copy on 64 of its SMs / on 124", lambda t: t("rate", what="copy", beside="nothing", sms=64) /
                   t("rate", what="copy", beside="nothing", sms=124), .85, 1.02, "x"),
            Expect("copy on 32 / on 124", lambda t: t("rate", what="copy", beside="nothing", sms=32) /
                   t("rate", what="copy", beside="nothing", sms=124), .45, .9, "x"),
            Expect("products on 64 / on 124", lambda t: t("rate", what="gemm", beside="nothing", sms=64) /
                   t("rate", what="gemm", beside="nothing", sms=124), .42, .6, "x"),
            Expect("copy on 32 beside products / beside nothing", lambda t: t("rate", what="copy", beside="gemm", sms=32) /
                   t("rate", what="copy", beside="nothing", sms=32), .6, 1.02, "x"),
            Expect("products on 96 beside copies / beside nothing", lambda t: t("rate", what="gemm", beside="copy", sms=96) /
                   t("rate", what="gemm", beside="nothing", sms=96), .7, 1.02, "x"),
            Expect("cutting the card", lambda t: t("cut_us", what="copy", beside="nothing", sms=64), 0, 50000, "us"),
        ],
        device="cuda",
    ),
]
