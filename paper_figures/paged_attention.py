"""Attention over blocks and over page groups, relative to attention over contiguous memory, all with one kernel
(vAttention Figs 2, 7, 8, 14)."""
import style

# Slowdown of the paper's paged kernels (ASPLOS'25): Fig. 2 for blocks of 256 and 16; Fig. 3 for blocks of 128 relative
# to 16.
PUBLISHED = {"prefill": [(256, 1.37), (16, 1.42)], "decode": [(128, 1.9)]}

table = style.result("paged_attention")
phases = table.distinct("phase")
figure, panels = style.plt.subplots(1, len(phases) + 1, figsize=(3.7 * (len(phases) + 1), 3.4))
for panel, phase in zip(panels, phases):
    base = table("ms", phase=phase, memory="contiguous")
    curve = [(b, *(v / base for v in rest)) for b, *rest in table.curve("block", "ms", phase=phase) if b > 0]
    style.line(panel, curve, 0, "this machine's kernel")
    if phase in PUBLISHED:
        text = "up to " + " and ".join(f"{slower} x" for _, slower in PUBLISHED[phase])
        style.paper(panel, *zip(*PUBLISHED[phase]), text)
    panel.axhline(table("ms", phase=phase, memory="token_major") / base, color=style.COLORS[1], linestyle="--",
                  linewidth=1, label="slots, token_major of 8 layers")
    panel.axhline(1, color="0.4", linestyle=":")
    style.powers(panel, sorted({int(row["block"]) for row in table.select(phase=phase)} - {0}))
    panel.set_xlabel("tokens of a block")
    panel.set_title(phase, fontsize=8)
    panel.legend(fontsize=6.5)
panels[0].set_ylabel("time / contiguous")
panel = panels[-1]
for number, phase in enumerate(phases):
    base = table("ms", phase=phase, memory="whole")
    curve = [(g, *(v / base for v in rest))
             for g, *rest in table.curve("group_kib", "ms", phase=phase, memory="vattention")]
    style.line(panel, curve, number, phase)
panel.axhline(1, color="0.4", linestyle=":")
panel.set_ylim(.8, 1.2)
style.powers(panel, [4, 64, 2048], ["4 KiB", "64 KiB", "2 MiB"])
panel.set_xlabel("page group, in random order")
panel.set_ylabel("time / one group for all")
panel.set_title("vAttention Fig. 14: no difference", fontsize=8)
panel.legend(fontsize=6.5)
style.save(figure, "paged_attention", table, "vAttention (ASPLOS'25): their paged kernels against other kernels")
