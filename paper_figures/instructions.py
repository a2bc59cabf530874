"""Instructions of attention over each memory (callgrind)."""
import style

from claims import once_more

MEMORIES = ["blocks of 1", "blocks of 16", "blocks of 256", "page groups"]
table = style.result("instructions")
figure, axes = style.plt.subplots(figsize=(6, 3.5))
for number, phase in enumerate(("decode", "prefill")):
    base = once_more(table, phase, "contiguous")
    axes.bar([at + .38 * number for at in range(len(MEMORIES))], [once_more(table, phase, m) / base for m in MEMORIES],
             width=.36, label=phase, **style.FILLS[number])
style.paper(axes, [1.38, 1.38], [1.07, 1.13], "prefill 1.07 to 1.13, other kernels", style.known("instructions", "prefill, blocks of 16"))
axes.axhline(1, color="black", linestyle=":", linewidth=.8)
axes.set_ylim(.95, 1.2)
axes.set_xticks([at + .19 for at in range(len(MEMORIES))], MEMORIES)
axes.set_ylabel("instructions / contiguous")
axes.legend(fontsize=7)
style.save(figure, "instructions", table, "vAttention (ASPLOS'25) Fig. 2")
