"""Goodput by the ratio of prefill to decode instances (as Mooncake's Fig. 15), for long prompts and for long outputs."""
import style

from claims import best_goodput, goodput

table = style.result("pd_ratio")
shapes = table.distinct("topology")
figure, panels = style.plt.subplots(1, 3, figsize=(11, 3.7), gridspec_kw={"width_ratios": [2, 2, 2.4]})
for number, (panel, work, title) in enumerate(zip(panels, ("prompts", "outputs"),
                                                  ("prompts of 4,000, outputs of 200", "prompts of 500, outputs of 300"))):
    for at, shape in enumerate(shapes):
        style.bar(panel, at, table, lambda t: goodput(t, work, shape), width=.7, **style.FILLS[number])
    panel.set_xticks(range(len(shapes)), shapes)
    panel.set_ylabel("goodput, requests/s (90 % within 1 s and 30 ms)", fontsize=8)
    panel.set_title(title, fontsize=9)
for side, work in enumerate(("prompts", "outputs")):
    for at, shape in enumerate(shapes):
        style.bar(panels[2], at + .4 * side, table, lambda t: goodput(t, work, shape) / best_goodput(t, work), width=.38,
                  label=None if at else f"long {work}", **style.FILLS[side])
panels[2].axhline(1, color="black", linestyle=":", linewidth=.8)
panels[2].set_xticks([i + .2 for i in range(len(shapes))], shapes)
panels[2].set_ylabel("goodput / the best ratio's")
panels[2].legend(fontsize=7)
style.save(figure, "pd_ratio", table)
