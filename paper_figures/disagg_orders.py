"""The orders of prefill and decode: first tokens, gaps and occupied memory, by load."""
import style

table = style.result("disagg_orders")
PANELS = [("ttft_p50_ms", "median TTFT, ms"), ("first_gap_p50_ms", "median first gap, ms"), ("tbt_p99_ms", "P99 gap, ms")]
ways = table.distinct("way")
figure, panels = style.plt.subplots(1, 4, figsize=(14, 3.6))
LOOKS = style.LINES + [{"color": "0.8", "linestyle": "-", "marker": "P"}]
for panel, (column, label) in zip(panels, PANELS):
    for way, look in zip(ways, LOOKS):
        x, y, _, _ = zip(*table.curve("load", column, way=way))
        panel.plot(x, y, label=way, linewidth=1.2, **look)
    panel.set_yscale("log")
    panel.set_xlabel("load, share of what two P compute")
    panel.set_ylabel(label)
panels[0].legend(fontsize=6.5)
bars = panels[3]
for side, (column, label) in enumerate([("prefill_gb_s", "on P"), ("decode_gb_s", "on D (or C)")]):
    at = [i + .4 * side for i in range(len(ways))]
    bars.bar(at, [table(column, way=way, load=.9) for way in ways], width=.38, label=label, **style.FILLS[side])
bars.set_xticks([i + .2 for i in range(len(ways))], ways, rotation=45, ha="right", fontsize=6.5)
bars.set_ylabel("KV occupied, GB s a request, load 0.9")
bars.legend(fontsize=7)
style.save(figure, "disagg_orders", table)
