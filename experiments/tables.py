"""Every table and figure of the notes and papers that this project follows, and what rebuilds it here.

A row is data. It names the document, the table or figure, what that shows, and the claims that rebuild it (`experiment: label`,
where * matches anything) or the command that prints it; `lacks` says what is not here. Nobody writes its state: state() derives
it from the claims' results. A claim with a published figure belongs to exactly one row, which test_run.py checks. There are no
rows for diagrams and notation, nor for papers that this project does not follow. The speeds of other libraries' kernels have
none either: `make bench`, `bench-peers` and `gpu-report` print them beside ours.
"""
from dataclasses import dataclass
from fnmatch import fnmatchcase

# If figures are compared, one that differs decides, then one that is undecided. If none can be compared, the state says how the
# result is known (HOW of claims.py), the strongest word first. `printed` compares nothing.
STATES = ["agrees", "differs", "undecided", "measured", "virtual", "counted", "computed", "printed", "not run", "needs a card", "absent"]


@dataclass
class Row:
    of: str  # the note or paper
    name: str  # the name of its table or figure
    shows: str
    claims: tuple = ()
    command: str = ""  # a command that prints it; nothing is compared
    lacks: str = ""  # the part of it that is not here; without claims and a command, the reason for that
    card: bool = False  # the missing part needs hardware: GPUs or RDMA NICs

    def has(self, key):
        return any(fnmatchcase(key, pattern) for pattern in self.claims)


XPYD, VA, TM = "xPyD notes", "vAttention (ASPLOS'25)", "TurboMind notes"
WDE, FAST, ARXIV, AUTHOR = "KV offloading notes (light-vllm)", "Mooncake (FAST'25)", "Mooncake (arXiv 2407.00079 v4)", "Mooncake's author's notes"
PA, LMSYS, WAVE, TT, DYNO = "PagedAttention (SOSP'23)", "SGLang's chunked pipeline (lmsys.org)", "WavePP", "tt-metal", "DynoSim (Dynamo's documents)"

ROWS = [
    # Output of a run.
    Row(XPYD, "serving block", "a run: requests, tokens, throughput, concurrency, TTFT, TPOT, ITL",
        command="xpyd bench --format sglang"),
    # Repetition of prompts.
    Row(XPYD, "prefix repetition, R over N and L", "maximal prefixes that N conversations share, longer than L, of all: 5.9 % (9,483 of 160,000)",
        ("prefix-repetition: R_*",), lacks="their conversations (dolly-15k, LMSYS): prefix-stats reads such files, but they are not here"),
    Row(XPYD, "prefixes that repeat", "the prefixes themselves, each with its count", command="xpyd prefix-stats FILE --list"),
    Row(XPYD, "radix tree beside blocks", "their granularities do not match", ("prefix-radix: *",)),
    # The runs of the xPyD notes.
    Row(XPYD, "two V100: 1P1D, two colocated", "TTFT and TBT; TTFT a tenth", ("pd_notes: two V100*", "pd_notes-table: two V100*", "pd: *", "pd_where-split: *"),
        lacks="model and lengths, which the notes do not state"),
    Row(XPYD, "eight L40: 4P4D, TP8 with V0 and V1", "34,965, 29,552 and 21,404 input tokens; TTFT, TPOT, ITL", ("pd_notes-table: eight L40*",),
        lacks="their engines; V0 and V1 are only schedules here"),
    Row(XPYD, "DeepSeek-R1: TP8 PP2, TP16 with MTP", "requests/s, TTFT, TPOT, ITL on 2 x 8 H20",
        ("pd_notes-table: R1*",), lacks="their engines and lengths"),
    Row(XPYD, "batch sizes", "one model's throughput and latency by batch: from 30 on, TTFT 300 to 900 s and ITL 0.2 to 0.3 s",
        ("pd_notes-table: batch*", "pd_notes-table: * at once, 1P1D*"), lacks="their lengths, and the batch of the last figures"),
    Row(XPYD, "heads of P to heads of D", "which rank sends to which if tensor ranks differ, with replicas and MLA",
        command="xpyd info experiments/models/llama-8b --ranks 2x1:4x1"),
    Row(XPYD, "3 GB of KV a second", "10,000 tokens/s of prefill, in bytes", command="xpyd info LLAMA2_70B --kv-dtype bf16"),
    # vAttention.
    Row(VA, "Table 1", "block tables: share of a decode step", ("paged_attention-block_table: *",), lacks="TensorRT-LLM's figure (-11 %), vLLM's kernel (2.8)"),
    Row(VA, "Table 3", "latency of each VMM call, by size of group",
        ("vmm_calls: map *",),
        lacks="the calls of a GPU's driver (make gpu-report prints them, but no claim compares them)"),
    Row(VA, "Table 8", "tokens of a row, worst waste", ("waste-max_batch: tokens of a row*", "waste-max_batch: Yi-34B, worst waste*")),
    Row(VA, "Table 9", "GB/s at which memory is handed out", ("vmm_calls: handed out*",)),
    Row(VA, "Fig. 2", "prefill of paged kernels over plain ones, prompts of 1K to 32K; instructions",
        ("paged_attention: prefill, blocks of 16 / contiguous", "paged_attention-cuda: prefill 32K*", "paged_attention-instructions: decode*", "paged_attention-instructions: prefill*")),
    Row(VA, "Fig. 3", "decode by block size",
        ("paged_attention-block_size: *", "paged_attention: decode, blocks of 1 / *", "paged_attention: decode, blocks of 256*", "paged_attention-cuda: decode 16 x 16K*")),
    Row(VA, "Fig. 4 (the notes' Fig. 6)", "throughput and memory that is needed a second, by batch of 1 to 300",
        ("vattention_speed: tokens/s*", "vattention_speed: KV grows*", "vattention_speed: bytes mapped*",
         "vattention_speed-costs: *tokens/s, batch*", "vattention_speed-costs: KV grows*")),
    Row(VA, "the notes' Fig. 7", "two sequences, page groups that appear and stay, step by step", command="xpyd tour --allocator vattention"),
    Row(VA, "2N buffers", "Yi-34B on two cards: 120 buffers, 12 TB of addresses",
        command="xpyd info experiments/models/yi-34b --prefill-tp 2 --max-batch 500 --kv-dtype bf16"),
    Row(VA, "Fig. 7, Table 6", "prefill by length of the prompt, and attention's part",
        ("vattention_speed: prompt*", "paged_attention-cuda: 2,048 tokens behind 128K*",
         "paged_attention-block_work: *")),
    Row(VA, "Fig. 8, Table 7", "decode by batch of 1 to 32",
        ("paged_attention: decode, blocks of 16 / contiguous", "vattention_speed: decode at 32, median step, paged*", "paged_attention-cuda: decode 32 x 16K*")),
    Row(VA, "Fig. 9", "offline requests a minute", ("vattention_speed: offline*", "vattention_speed-virtual: *offline*")),
    Row(VA, "Fig. 10", "CDF of latency online, Poisson arrivals", ("vattention_speed-virtual: *arrivals*",),
        lacks="the CDF as a figure; -28 % and -29 % of the two larger models, whose request rates we do not know relative to their capacity"),
    Row(VA, "Fig. 11", "FlashAttention-3 over vAttention, offline", lacks="its kernel on an H100, without a block table and with one", card=True),
    Row(VA, "Fig. 12", "decode iterations with overlapped mapping and without",
        ("vmm_calls-map_overlap: longest decode*", "vmm_calls-map_overlap: iterations*", "vmm_calls-map_overlap: waiting*")),
    Row(VA, "Fig. 13", "prefill with deferred reclamation and without", ("vmm_calls-map_overlap: prompt*",)),
    Row(VA, "Fig. 14", "attention by size of page group",
        ("paged_attention: decode, page groups*", "vattention_speed: decode at 32, median step, contiguous in*")),
    Row(VA, "Fig. 15", "largest batch by size of page group",
        ("waste-max_batch: Yi-6B*", "waste-max_batch: Llama*", "waste-max_batch: Yi-34B TP-2*", "waste: batch, vAttention*")),
    # KV offloading.
    Row(WDE, "experiment 1", "prefill, swap in, swap out of 8,192 tokens, eight model shapes", ("offload_cost: *", "offload_cost-shapes: *"), lacks="the naive copies, which are torch's"),
    Row(WDE, "experiment 1, by copy", "bytes and time of a copy", ("offload_cost-copy: *scattered*",)),
    Row(WDE, "experiment 2", "profiles of swapping out and in", ("offload_cost-trace: *",)),
    Row(WDE, "experiment 3", "requests/s with and without, eight chunk sizes, sync and async-2, prefix cache on and off",
        ("offload_overhead*: *", "offload_overhead-ahead: *", "offload_virtual: steps*"),
        lacks="their figures for 64 to 768 tokens, of which we know only the range"),
    Row(WDE, "prefix caching", "requests/s at 0 to 100 % hits in the pool: 20.62 to 98.84, async-2 20.93 to 124.47",
        ("offload_virtual: all hits / none*", "offload_virtual-pool_tables: all hits / none*", "offload_virtual-pool_tables: no hits*", "offload_hits: device*",
         "offload_virtual: planned*"), lacks="the 2 % that hashing takes"),
    Row(WDE, "experiment 4", "requests/s by share of hits, in the pool and in the host tier, 1,000 prompts",
        ("offload_hits: host*", "offload_hits: different*", "offload_virtual: 200 prompts*", "offload_virtual: all hits, host*",
         "offload_virtual: no hits*", "offload_virtual-pool_tables: *% hits*", "offload_virtual-pool_tables: all hits: *"),
        lacks="their figures between 0 and 100 %, which we know only in words"),
    Row(WDE, "experiment 5", "rounds of ten documents, 2 to 128 tokens out",
        ("offload_hits-rounds: round 1*", "offload_hits-rounds: round 3, [!f]*",
         "offload_hits-rounds: different*", "offload_virtual: documents*", "offload_virtual: in the pool*", "offload_virtual: tier*",
         "offload_virtual: pool and tier*", "offload_virtual: round 1*", "offload_virtual-pool_tables: documents*"),
        lacks="their figures for 4, 8, 32 and 64 tokens, which we do not know"),
    Row(WDE, "tiers below the host", "a disk is 3 to 4 times as slow", ("offload_hits-rounds: round 3, from a disk*",), lacks="remote hosts"),
    Row(WDE, "block size", "requests/s by blocks of 16 to 128: all the same", ("paged_attention-block_speed: *",)),
    Row("vLLM #10874", "documents", "seconds of 8 to 64 documents, with a host tier that overflows", ("offload_hits-rounds: seconds of*",)),
    Row("vLLM #35990", "coalesced copies", "1 to 3 GB/s by blocks, 40 to 43 coalesced", ("offload_cost-copy: in, pieces*", "offload_cost-copy: pieces*")),
    # TurboMind.
    Row(TM, "slots", "sequences keep slots; LRU evicts to token ids; rows over time; memory before, on demand, between",
        ("slots: *", "slots-time: *")),
    Row(TM, "persistent batch", "requests a second: 14.556 static, up to 1.8 times vLLM's", lacks="Llama-2-7B on an A100 beside vLLM", card=True),
    Row(TM, "KV int8 and int4: memory", "tokens of the same bytes", ("kv_dtype: tokens*",)),
    Row(TM, "KV int8 and int4: requests/s", "Llama-2-7B and 13B, InternLM2-7B on an A100", ("kv_dtype: requests/s*",), lacks="13B (1.28, 1.39)"),
    Row(TM, "KV int8 and int4: points", "accuracy of models in benchmarks", ("kv_dtype-logits: *",), lacks="their models (gsm8k of InternLM2-7B)"),
    Row(TM, "several instances, tensor ranks, one process", "collectives of several instances that hang",
        command="xpyd generate --topology 3P3D --prefill-tp 2 --decode-tp 2",
        lacks="NCCL's collectives: instances on a GPU have no tensor ranks here (tests/disagg/hang_test.cc tests those on the CPU)"),
    Row(TM, "TurboQuant K4V2", "a fifth of the KV memory, -7.3 % throughput on an H200", lacks="its code of 4 and 2 bits"),
    Row("lightllm (TokenAttention)", "Efficient Router", "requests/s with a look ahead at admission", ("batching-admission: *",)),
    Row("kvcached", "bench_layout", "all layers in a block, beside one each", ("paged_attention: decode, token_major*",), lacks="requests/s (-31 %)"),
    Row("kvcached", "page pinning", "LRU at stride 8 frees 0.03 of 0.88 GB", lacks="a count over pages that hold several blocks, which do not exist here"),
    Row("TensorRT-LLM #15931", "per-sequence arenas", "throughput, -0.4 to -15.3 %", lacks="arenas: a sequence's blocks side by side in a pool of pages"),
    Row("vTensor (arXiv 2407.15309)", "headlines", "1.86 times, 2.42 in conversations; 57 GB freed",
        lacks="conversations over --kv-share takeover beside blocks, on the cost of an A100 (sharing has the times of one prefix)"),
    Row("vLLM #11382", "hybrid layers", "memory wasted by padded pages: 25 to 79.6 %", lacks="layers with a sliding window that free their blocks"),
    # Mooncake.
    Row(FAST, "section 2.2", "bandwidth from which a prefix is fetched: 6 and 19 GB/s", ("fetch_or_compute-break_even: 8 x*",)),
    Row(FAST, "Table 2", "traces: requests, lengths, cache ratio",
        ("prefix-repetition: tokens an unlimited*", "mooncake_traces: conversation: *", "mooncake_traces: synthetic: *"),
        lacks="tool&agent's trace"),
    Row(FAST, "Fig. 1", "conversation: requests within TBT, beside vLLM", ("mooncake_serving: conversation: *", "mooncake_serving: the same within 300 ms"),
        lacks="vLLM itself, with prefix caching and with chunks, apart"),
    Row(FAST, "Fig. 5", "TTFT by scheduler", ("mooncake_serving: schedulers, conversation*",)),
    Row(FAST, "Fig. 6", "tool&agent, as Fig. 1", ("mooncake_serving: tool&agent*",)),
    Row(FAST, "Fig. 7", "synthetic, as Fig. 1", ("mooncake_serving: synthetic: requests*", "mooncake_serving: synthetic: within 30 s*")),
    Row(FAST, "Fig. 8", "prefill's GPU seconds a request, three loads, four systems",
        lacks="P's seconds without a cache, with each instance's own, with chunks, over Mooncake's"),
    Row(FAST, "Fig. 9", "hits of one cache by its size", ("mooncake_traces-eviction: *LRU, *M tokens*",), lacks="tool&agent, and all three together"),
    Row(FAST, "Fig. 10", "hits and P's time, with a cache for each instance and with one for all",
        ("fetch_or_compute-pool: *hits, global*", "fetch_or_compute-pool: *P's time*", "fetch_or_compute: *hits, always*",
         "fetch_or_compute-pool_live: three instances*")),
    Row(FAST, "Fig. 11", "copies of the hottest keys over time", ("fetch_or_compute-pool: *with a copy*",)),
    Row(FAST, "Fig. 12", "Transfer Engine, TCP and Gloo: latency of 0 to 100 GB", lacks="4 RDMA NICs of 200 Gb/s and 8 of 400", card=True),
    Row(FAST, "Fig. 13", "TTFT and transfer time by the network's rate",
        ("fetch_or_compute-pool: synthetic, 100 Gb/s*", "fetch_or_compute-pool: synthetic: mean TTFT*", "fetch_or_compute-pool_live: a link*")),
    Row(FAST, "Fig. 14", "where the time of one long prompt goes", ("fetch_or_compute-breakdown: *", "prefix: *")),
    Row(FAST, "Fig. 15", "share within the objectives by ratio of P to D", ("mooncake_serving: synthetic: within 10 s*", "pd_where-ratio: *"),
        lacks="its part b: means of TTFT and TBT"),
    Row("Mooncake's documents", "transfer by length of the prompt", "vLLM 1P1D on 8 ConnectX-7: 18 % of the link at 128 tokens, 71 % at 32K",
        lacks="8 RDMA NICs of 200 Gb/s", card=True),
    Row("Mooncake's documents", "SSD below the store", "TTFT -57 %, input 2.4 times", lacks="a claim over --disk-kv-dir with a pool and a host tier that overflow, as theirs"),
    Row(ARXIV, "Fig. 2", "prefill by length, decode by batch", ("mooncake_traces-steps: *",), lacks="their measured figures"),
    Row(ARXIV, "Fig. 5", "distribution of lengths", ("mooncake_traces: lengths: *",), lacks="their trace, of which FAST'25's tool&agent is the later form"),
    Row(ARXIV, "Table 1", "hits by eviction policy and capacity", ("mooncake_traces-eviction: *5,859 blocks*",),
        lacks="their trace; other capacities are measured, and no claim compares them"),
    Row(ARXIV, "Fig. 6", "how often blocks are hit", ("mooncake_traces: uses: *",)),
    Row(ARXIV, "Fig. 7", "latency of storing KV, serial and by layers: 0.87 and 0.10 s at 128K",
        ("transfer_exposed-mooncake_store: *",)),
    Row(ARXIV, "Fig. 8", "TTFT by scheduler, 23,000 requests", ("mooncake_serving: schedulers, tool&agent*",),
        lacks="their trace, which a generated one replaces; attainment"),
    Row(ARXIV, "Figs. 9, 10", "load of P and D swings under early rejection",
        ("rejection: *correlation*",), lacks="a figure of the twenty minutes beside theirs"),
    Row(ARXIV, "Table 2", "data sets: lengths and cache ratios", ("mooncake_serving-loads: L-Eval: tokens*",),
        lacks="the data: every request has the mean lengths of its set"),
    Row(ARXIV, "Fig. 11", "ArXiv +20 %, L-Eval +40 %, 3P1D and 2P2D over four vLLM",
        ("mooncake_serving-loads: ArXiv*", "mooncake_serving-loads: L-Eval, *")),
    Row(ARXIV, "Fig. 12", "simulated prompts of 16K to 128K: +50 to 525 %", ("mooncake_serving-loads: 16K*", "mooncake_serving-loads: 128K*")),
    Row(ARXIV, "Fig. 13", "the trace on 10P10D and 20 vLLM: +75 %", ("mooncake_serving-loads: trace*",), lacks="their trace, which a generated one replaces"),
    Row(ARXIV, "Table 3", "requests refused: late, early, predicted", ("rejection: Table 3*",)),
    Row(AUTHOR, "break-even", "bandwidth from which KV is worth a transfer, A100 at 220 TFLOPS and 100 Gb/s",
        ("fetch_or_compute-break_even: A100*",)),
    Row(AUTHOR, "VRAM occupation cost", "GB s of a request, chunks inline beside disaggregation",
        ("disagg_orders: GB s*", "disagg_orders-occupation: *")),
    Row(AUTHOR, "TBT, not TPOT", "a request's longest tenth of gaps", command="xpyd bench --format sglang"),
    Row(AUTHOR, "MFU of P and D", "share of the processor's FLOP/s by instance: mfu in /metrics", command="xpyd serve --topology 1P1D",
        lacks="a GPU's peak: for GPUs only model_flops_total is reported"),
    Row(AUTHOR, "chunks need no dynamic programming", "CPP is TeraPipe without backward", ("cpp_chunks: one prompt: *",)),
    # PagedAttention, batching, P and D.
    Row(PA, "Fig. 2", "useful, reserved and wasted bytes of the pool", ("waste: useful, slots", "waste: useful, blocks of 16",
         "waste-orca_slots: [!b]*", "waste-orca_slots: blocks*")),
    Row(PA, "throughput", "2 to 4 times FasterTransformer and Orca at equal latency", lacks="Orca's allocators as baselines at a rate"),
    Row(PA, "Fig. 13a", "sequences at once", ("waste: batch, blocks*", "waste-orca_slots: batch*")),
    Row(PA, "parallel and beam sampling", "blocks saved by sharing, 6.1 to 66.3 %", ("waste-parallel_sampling: *",), lacks="beam search"),
    Row(PA, "shared prefix", "1.67 and 3.58 times Orca's throughput", lacks="Orca's side"),
    Row(PA, "Fig. 18a", "its kernel 20 to 26 % slower than FasterTransformer's", lacks="another library's kernel (vAttention Fig. 8 has ours over both memories)"),
    Row(PA, "Fig. 18b", "latency by block size", ("paged_attention-block_latency: *",)),
    Row("Orca (OSDI'22)", "section 6", "iteration-level batching: throughput and latency", ("batching: *",), lacks="their models; a figure to compare"),
    Row("Sarathi-Serve (OSDI'24)", "section 4.3", "gaps by token budget", ("batching-chunk*: *",)),
    Row("Sarathi-Serve (OSDI'24)", "capacity", "2.6, 3.7 and 5.6 times vLLM's", ("batching-sarathi_capacity: *",), lacks="Falcon-180B's 5.6, which has stages"),
    Row("DistServe (OSDI'24)", "goodput", "7.4 times the requests at 90 % attainment",
        lacks="OPT-13B to 175B beside instances that do not cut prompts, within their objectives (pd_where has the best chunk size)"),
    Row("Splitwise (ISCA'24)", "section 4.2", "KV's transfer by layer, hidden", ("transfer_exposed: *",),
        lacks="1.4 and 2.35 times at equal cost and power: cards of two kinds in one cluster"),
    Row("TaiChi", "goodput", "+9 to 47 % over aggregation, +29 to 77 % over disaggregation", lacks="separate chunk sizes for P-heavy and D-heavy instances"),
    Row("DynaServe", "capacity", "1.15 to 3.07 times, a request split at any token", lacks="a split at any token"),
    Row("papers on dividing one card", "headlines", "1.0 to 5.1 times: semi-PD, Nexus, Drift, DuetServe",
        lacks="a comparison of each on one GPU", card=True),
    Row("pegainfer (RTX 5090, Qwen3-4B)", "stream priority", "ITL P99 as of one instance", ("pd-cuda: *",), lacks="that card and model"),
    Row("SGLang", "overlap scheduling", "1.1 to 1.3 times", lacks="--async-scheduling on and off by model size on a card", card=True),
    Row("Vidur, LLMServingSim, Frontier", "errors", "simulated latency against measured: 1 to 14 %", ("truth: *",), lacks="their engines"),
    # Chunked pipeline parallelism.
    Row(LMSYS, "Figs. 2, 6", "chunks by slot and stage, growing and equal", lacks="the same drawing from pipeline_time.h or a live event log"),
    Row(LMSYS, "throughput and TTFT", "DeepSeek-V3.1 PP4 TP8, Qwen3-235B PP8 TP4 on H20, 128K to 1M", ("cpp_chunks-window: *",),
        lacks="TP32's 2.54; chunk sizes and smoothing factors"),
    Row(LMSYS, "bytes sent", "TP, CP (sequence parallelism, as a ring and as Ulysses) and PP by formula", ("cpp_vs_tp-bytes: *",)),
    Row(TT + " #49903", "one rank and two", "DeepSeek-V3, 11 chunks: 30.31 and 15.63 s", ("cpp_live-closed_form: *",)),
    Row(WAVE, "Table 4", "PP8 beside TP8, 65.5K to 262K, cold and 90 % reused", ("cpp_vs_tp-bubble: *", "cpp_vs_tp: *"),
        lacks="262K cold; vLLM's and SGLang's pipelines"),
    Row(WAVE, "ablation: waves", "cold 131K: 8,826 to 29,692 tokens/s, then MPU", ("cpp_chunks-lockstep: *", "cpp_chunks: cold*"), lacks="MPU"),
    Row(WAVE, "ablation: leases and escrow", "reuse 131K: 96,796 to 149,021 tokens/s", ("rejection-reservation: *",)),
    Row("Revisiting Pipeline Parallelism (OSDI'26)", "predictive chunks", "TPOT -35 %, E2E -31 %; goodput 2.7 to 5.4 times",
        lacks="Qwen2.5-32B on four A100-40 and Azure's trace: chunks that adapt to the load, on a pipeline that also decodes"),
    Row("TeraPipe (ICML'21)", "slices by dynamic programming", "5.0 times, in training", lacks="training"),
    # Routers, pools, drafts.
    Row(DYNO, "KV router and round robin", "reuse, TTFT, throughput, eight workers", ("routers-dynosim: *",)),
    Row(DYNO, "planner", "scaling events and P90 by interval of 1 to 300 s; start-up delay",
        lacks="a planner that starts and stops instances"),
    Row(DYNO, "best split", "5P x TP2 and 6D x TP1; disaggregation worse elsewhere", lacks="their search over P, D and tp"),
    Row(DYNO, "speed of the simulator", "23,608 requests in 2.41 s", ("truth-simulator_speed: *",)),
    Row("LMetric (OSDI'26)", "headlines", "TTFT -92 %, TPOT -24 % beside vLLM's router, 16 H20, four traces",
        lacks="a claim that compares the rows lmetric and least_loaded of routers; their traces"),
    Row("Qwen-Bailian's traces", "hits", "of an endless cache, and LRU by size: A, B, coder, thinking",
        lacks="the traces, which are not in the repository that names them"),
    Row("SGLang, MTP", "16 H200", "51.0, 60.4, 81.5 and 82.0 tokens/s of a rank", lacks="a virtual run with MTP and overlap, by batch"),
    Row("TurboSpec", "best k by batch", "4 to 5 at 1, 1 to 2 at 64, none from 16 on", ("speculate-optimum: *", "speculate: *")),
]


def rows_of(key):
    """The rows to which a claim (`experiment: label`) belongs."""
    return [row for row in ROWS if row.has(key)]


def by(row, found):
    """The experiments that rebuild the row, in order."""
    return list(dict.fromkeys(key.split(": ")[0] for key in found if row.has(key)))


def state(row, found):
    """Returns (a word of STATES, how it is known and what limits it), from {`experiment: label`: (Claim, Expect, Evidence)}."""
    own = [one for key, one in found.items() if row.has(key)]
    ran = [one for one in own if one[2].verdict != "not run"]
    compared = [one for _, _, one in ran if one.paper]
    hows = {claim.how_of(e) for claim, e, _ in ran}
    if compared:
        word = next(word for word in ("differs", "undecided", "agrees") if any(one.paper == word for one in compared))
    elif ran:
        word = next(word for word in STATES if word in hows)
    elif own:
        word = "needs a card" if all(claim.device == "cuda" for claim, _, _ in own) else "not run"
    else:
        word = "printed" if row.command else "needs a card" if row.card else "absent"
    notes = []
    if compared:
        agree = sum(one.paper == "agrees" for one in compared)
        notes.append(f"{', '.join(how for how in STATES if how in hows)}, {agree} of {len(compared)} figures agree")
    whys = list(dict.fromkeys(e.differs for _, e, one in ran if one.paper == "differs" and e.differs))
    notes += [why for why in whys if not why.startswith("as ")] or whys  # a reason "as ..." refers to another one, which is listed here
    left = [claim for claim, _, one in own if one.verdict == "not run"]
    if ran and left:
        notes.append(f"not run{', for want of a card' if all(claim.device == 'cuda' for claim in left) else ''}: {len(left)}")
    if row.lacks:
        notes.append(f"lacks {row.lacks}")
    return word, ". ".join(notes)


def states(found):
    """Returns ([(row, word, notes)] of all rows, the count of each word as text)."""
    all_ = [(row, *state(row, found)) for row in ROWS]
    counts = [(word, sum(word == each for _, each, _ in all_)) for word in STATES]
    partly = sum(bool(row.lacks) for row, word, _ in all_ if row.claims or row.command)
    return all_, f"{len(all_)} tables and figures: " + ", ".join(f"{n} {word}" for word, n in counts if n) + (
        f"; {partly} of those that are here lack something")
