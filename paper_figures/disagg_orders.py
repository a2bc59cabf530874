"""The orders of prefill and decode: TTFT, gaps between tokens, and KV memory occupied, by load."""
import style

table = style.result("disagg_orders")
PANELS = [("ttft_p50_ms", "median TTFT, ms"), ("first_gap_p50_ms", "median first gap, ms"), ("tbt_p99_ms", "P99 gap, ms")]
ways = table.distinct("way")
loads = sorted(float(load) for load in table.distinct("load"))
figure, panels = style.plt.subplots(2, 2, figsize=(9.5, 7))
panels = panels.flatten()
for panel, (column, label) in zip(panels, PANELS):
    for number, way in enumerate(ways):  # shifted sideways, so that no curve hides another
        curve = [(x + .008 * (number - 3), *rest) for x, *rest in table.curve("load", column, way=way)]
        style.line(panel, curve, number, way)
    style.plain_log(panel)
    panel.set_xticks(loads, [f"{load:g}" for load in loads])
    panel.set_xlabel("load, share of what two P compute")
    panel.set_ylabel(label)
panels[0].legend(fontsize=7, ncol=2)
bars = panels[3]
for side, (column, label) in enumerate([("prefill_gb_s", "on P"), ("decode_gb_s", "on D (or C)")]):
    for at, way in enumerate(ways):
        style.bar(bars, at + .4 * side, table, lambda t: t(column, way=way, load=.9), width=.38, label=None if at else label,
                  **style.FILLS[side])
bars.set_xticks([i + .2 for i in range(len(ways))], [way.replace("_", "\n") for way in ways], fontsize=8)
bars.set_ylabel("KV occupied, GB s a request, load 0.9")
bars.legend(fontsize=7)
style.save(figure, "disagg_orders", table)
