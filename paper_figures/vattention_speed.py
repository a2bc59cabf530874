"""Three allocators under one model and one kernel: prefill, decoding, throughput, and the rate at which KV grows
(vAttention Figs 4, 7, 8, 9)."""
import statistics

import style

ALLOCATORS = ["contiguous", "paged", "vattention"]
# ASPLOS'25: gains over the paged kernels of FlashAttention and FlashInfer, at 192K tokens (Fig. 7) and offline (Fig.
# 9).
PUBLISHED_PREFILL, PUBLISHED_OFFLINE = (1.24, 1.36), (1.13, 1.23)


def gain(phase, size, column, invert=False):
    """The gain of vattention over paged: (median, interval)."""
    ratios = []
    for part in table.samples():
        ratio = part(column, phase=phase, size=size, allocator="vattention") / part(column, phase=phase, size=size,
                                                                                    allocator="paged")
        ratios.append(1 / ratio if invert else ratio)
    return statistics.median(ratios), *style.interval(ratios)


table = style.result("vattention_speed")
figure, panels = style.plt.subplots(1, 4, figsize=(13, 4))
sizes = [int(s) for s in table.distinct("size", phase="prefill")]
style.line(panels[0], [(s, *gain("prefill", s, "seconds", True)) for s in sizes], 0, "vattention / paged")
style.paper(panels[0], [sizes[-1]] * 2, PUBLISHED_PREFILL, "1.24 to 1.36 x")
style.line(panels[0], table.curve("size", "attention_share", phase="prefill", allocator="vattention"), 1,
           "attention's share of the time")
panels[0].set_title("prompts (Fig. 7: at 192K)", fontsize=8)
panels[0].set_ylabel("speed over paged; share")
panels[0].set_xlabel("tokens of the prompt")
style.powers(panels[0], sizes)
batches = [int(s) for s in table.distinct("size", phase="decode")]
for number, allocator in enumerate(ALLOCATORS):
    style.line(panels[1], table.curve("size", "tokens_per_s", phase="decode", allocator=allocator), number, allocator)
panels[1].set_title("decoding behind 1,024 tokens (Fig. 8)", fontsize=8)
panels[1].set_ylabel("tokens/s")
style.line(panels[2], table.curve("size", "grown_mbps", phase="decode", allocator="vattention"), 0, "mapped")
style.line(panels[2], table.curve("size", "written_mbps", phase="decode", allocator="vattention"), 1, "written")
panels[2].set_title("KV grows (Fig. 4: 750 MB/s =\n11.4K, 5.7K, 3.1K tokens/s of 64, 128, 240 KiB)", fontsize=8)
panels[2].set_ylabel("MB/s")
for panel in panels[1:3]:
    style.powers(panel, batches)
    panel.set_xlabel("sequences")
    panel.set_ylim(bottom=0)
offline = int(table.distinct("size", phase="offline")[0])
for number, (phase, size, column, invert) in enumerate((("prefill", sizes[-1], "seconds", True),
                                                        ("decode", batches[-1], "step_ms", True),
                                                        ("offline", offline, "requests_per_min", False))):
    middle, low, high = gain(phase, size, column, invert)
    panels[3].bar(number, middle, width=.6, yerr=[[middle - low], [high - middle]], capsize=3, **style.FILLS[0])
style.paper(panels[3], [0, 0], PUBLISHED_PREFILL, "1.24-1.36, 1, 1.13-1.23 x")
style.paper(panels[3], [2, 2], PUBLISHED_OFFLINE, "1.24-1.36, 1, 1.13-1.23 x")
style.paper(panels[3], 1, 1, "1.24-1.36, 1, 1.13-1.23 x")
panels[3].axhline(1, color="0.4", linestyle=":")
panels[3].set_xticks(range(3), ["prompts", "decoding", "offline"])
panels[3].set_ylabel("vattention / paged, speed")
panels[3].set_title("one kernel over both (Figs 7, 8, 9)", fontsize=8)
for panel in panels[:3]:
    panel.legend(fontsize=6.5)
style.save(figure, "vattention_speed", table, "vAttention (ASPLOS'25): gains over other libraries' paged kernels, A100")
