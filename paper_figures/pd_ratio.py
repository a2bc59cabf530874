"""Share of requests within their objectives by rate, for each ratio of P to D; and goodput by ratio."""
import style

from claims import goodput

table = style.result("pd_ratio")
shapes = table.distinct("topology")
figure, panels = style.plt.subplots(1, 3, figsize=(12, 3.4))
for panel, work, title in zip(panels, ("prompts", "outputs"), ("prompts of 4,000, outputs of 200", "prompts of 500, outputs of 300")):
    for number, shape in enumerate(shapes):
        style.line(panel, table.curve("rate", "good_share", work=work, topology=shape), number, shape)
    panel.axhline(.9, color="0.6", linewidth=.8, linestyle=":")
    panel.set_xlabel("requests/s")
    panel.set_ylabel("share within 1 s and 30 ms")
    panel.set_title(title, fontsize=9)
panels[0].legend(fontsize=7)
for side, work in enumerate(("prompts", "outputs")):
    best = max(goodput(table, work, s) for s in shapes)
    panels[2].bar([i + .4 * side for i in range(len(shapes))], [goodput(table, work, s) / best for s in shapes], width=.38,
                  label=f"long {work}", **style.FILLS[side])
panels[2].set_xticks([i + .2 for i in range(len(shapes))], shapes)
panels[2].set_ylabel("goodput / the best one's")
panels[2].legend(fontsize=7)
style.save(figure, "pd_ratio", table)
