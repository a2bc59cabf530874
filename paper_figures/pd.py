"""TTFT and gaps between tokens by load, colocated and disaggregated."""
import style

SHAPE = ("topology", "transport", "split", "chunk")
table = style.result("pd")
shapes = list(dict.fromkeys(tuple(row[c] for c in SHAPE) for row in table.rows))
words = [" ".join([s[0]] + ([s[1]] if s[0] != "1C" and "P" in s[0] else []) + ([s[2]] if s[2] != "off" else []) +
                  ([f"chunk {s[3]}"] if len({x[3] for x in shapes}) > 1 else [])) for s in shapes]
figure, (left, right) = style.plt.subplots(1, 2, figsize=(9, 3.9))
loads = sorted(float(load) for load in table.distinct("load"))
for number, (shape, label) in enumerate(zip(shapes, words)):
    where = dict(zip(SHAPE, shape))
    look = number % len(style.LINES)
    for panel, column in ((left, "mean_ttft_ms"), (right, "p99_itl_ms")):
        shifted = [(x + .006 * (number - 2), *rest) for x, *rest in table.curve("load", column, **where)]
        style.line(panel, shifted, look, label)
left.set_ylabel("mean TTFT, ms")
right.set_ylabel("P99 gap between tokens, ms")
for panel in (left, right):
    style.plain_log(panel)
    panel.set_xticks(loads, [f"{load:g}" for load in loads])
    panel.set_xlabel("load, share of what 1C can end")
left.legend(fontsize=7)
style.save(figure, "pd", table)
