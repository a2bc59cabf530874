"""Decode iterations with and without mapping ahead, and prompts with and without deferred reclamation, with a GPU's
mapping latency (vAttention Figs 12, 13)."""
import statistics

import style

table = style.result("map_overlap")
figure, (left, right) = style.plt.subplots(1, 2, figsize=(9.5, 3.9))
for mode, label, look in (("sync", "mapped when needed", {"color": style.COLORS[1], "linewidth": 1}),
                          ("ahead", "mapped ahead", {"color": style.COLORS[0], "linewidth": 1.3})):
    rows = [row for row in table.select(part="decode", mode=mode) if row["repeat"] == table.rows[0]["repeat"]]
    left.plot([int(row["n"]) for row in rows], [float(row["ms"]) for row in rows], label=label, **look)
left.axhspan(25, 35, color="#F0E442", alpha=.35, zorder=0, label=f"paper{style.known('map_overlap', 'longest decode iteration')}: spikes of 5 to 15 ms more")
left.set_ylim(bottom=0)
left.set_xlabel("decode iteration")
left.set_ylabel("ms (the model: 20)")
left.legend(fontsize=7, loc="lower right")


def curve(mode):
    """(group, median, least, greatest) over repetitions of time / the model's, without the first prompt of each."""
    points = []
    for group in table.distinct("group_kib", part="prefill"):
        ratios = []
        for part in table.samples():
            rows = [r for r in part.select(part="prefill", mode=mode, group_kib=group) if r["n"] != "0"]
            ratios.append(statistics.mean(float(r["ms"]) / float(r["model_ms"]) for r in rows))
        points.append((int(group), statistics.median(ratios), *style.interval(ratios)))
    return points


for number, (mode, label) in enumerate((("sync", "when needed, a call for each group"), ("runs", "when needed, in runs"),
                                        ("deferred", "deferred reclamation, ahead"))):
    style.line(right, curve(mode), number, label)
style.paper(right, [64, 64], [1.15, 1.0], "1.15 x when needed, 1.00 x deferred", style.known("map_overlap", "prompt, 64 KiB, mapped when needed"))
style.powers(right, [64, 128, 256, 2048], ["64 KiB", "128 KiB", "256 KiB", "2 MiB"])
right.set_xlabel("page group that it stands for")
right.set_ylabel("prefill time / the model's")
right.legend(fontsize=7)
style.save(figure, "map_overlap", table, "vAttention (ASPLOS'25) Figs 12, 13, A100; here its latencies, injected")
