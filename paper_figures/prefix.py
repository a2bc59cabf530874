"""Prompt tokens found in the prefix cache, and TTFT, by the share of the prompt that is shared."""
import style

table = style.result("prefix")
figure, (left, right) = style.plt.subplots(1, 2, figsize=(8, 3.3))
hits = table.curve("share", "hit_share", cache="on")
style.line(left, hits, 0, "measured")
left.plot([x for x, *_ in hits], [x * 22 / 24 for x, *_ in hits], color="0.4", linestyle=":",
          label="22/24 of the share")
left.set_ylabel("prompt tokens found")
ttft = table.curve("share", "ttft_ms", cache="on")
base = ttft[0][1]
style.line(right, [(x, *(v / base for v in rest)) for x, *rest in ttft], 0, "cache on")
off = [(x, *(v / base for v in rest)) for x, *rest in table.curve("share", "ttft_ms", cache="off")]
style.line(right, off, 1, "cache off")
right.plot([0, 1], [1, 0], color="0.4", linestyle=":", label="tokens left")
style.paper(right, .95, .14, "0.14 at 95 % of 128K tokens")  # FAST'25: TTFT -86 %
right.set_ylabel("TTFT / with nothing shared")
right.set_ylim(bottom=0)
for panel in (left, right):
    panel.set_xlabel("share of the prompt that is shared")
    panel.legend(fontsize=7)
style.save(figure, "prefix", table, "arithmetic; Mooncake (FAST'25) Fig. 14")
