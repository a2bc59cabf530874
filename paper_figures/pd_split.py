"""One card whole or cut for prefill and decode, on a virtual clock: first tokens and gaps by load."""
import style

table = style.result("pd_split")
figure, panels = style.plt.subplots(1, 2, figsize=(8.4, 3.6))
loads = sorted(float(load) for load in table.distinct("load"))
for number, shape in enumerate(table.distinct("topology")):
    for panel, column in zip(panels, ("median_ttft_ms", "p99_itl_ms")):
        curve = [(x + .006 * (number - 1), *rest) for x, *rest in table.curve("load", column, topology=shape)]
        style.line(panel, curve, number, {"1C": "1C, the card", "1P1D": "1P1D, halves", "2P1D": "2P1D, thirds"}[shape])
for panel, label in zip(panels, ("median TTFT, ms", "P99 gap between tokens, ms")):
    panel.set_xticks(loads, [f"{load:g}" for load in loads])
    panel.set_xlabel("load, share of what 1C can end")
    panel.set_ylabel(label)
style.plain_log(panels[0])
panels[1].set_ylim(bottom=0)
panels[0].legend(fontsize=7)
style.save(figure, "pd_split", table)
