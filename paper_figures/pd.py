"""TTFT and ITL against load, colocated and disaggregated; and the table of vLLM's benchmark with one column a topology,
as the xPyD notes print it (paper_figures/out/pd.md)."""
import os

import style

ROWS = [("Request throughput (req/s)", "request_throughput"), ("Output token throughput (tok/s)", "output_throughput"),
        ("Mean TTFT (ms)", "mean_ttft_ms"), ("Median TTFT (ms)", "median_ttft_ms"), ("P99 TTFT (ms)", "p99_ttft_ms"),
        ("Mean TPOT (ms)", "mean_tpot_ms"), ("Median TPOT (ms)", "median_tpot_ms"), ("P99 TPOT (ms)", "p99_tpot_ms"),
        ("Mean ITL (ms)", "mean_itl_ms"), ("Median ITL (ms)", "median_itl_ms"), ("P99 ITL (ms)", "p99_itl_ms")]
SHAPE = ("topology", "transport", "split", "chunk")

for name in ("pd", "pd-cuda"):
    try:
        table = style.Table.load(style.path(name))
    except style.TableError as error:
        print(f"not drawn: {error}")
        continue
    shapes = list(dict.fromkeys(tuple(row[c] for c in SHAPE) for row in table.rows))
    words = [" ".join([s[0]] + ([s[1]] if s[0] != "1C" and "P" in s[0] else []) + ([s[2]] if s[2] != "off" else []) +
                      ([f"chunk {s[3]}"] if len({x[3] for x in shapes}) > 1 else [])) for s in shapes]
    figure, (left, right) = style.plt.subplots(1, 2, figsize=(9, 3.6))
    for number, (shape, label) in enumerate(zip(shapes, words)):
        where = dict(zip(SHAPE, shape))
        look = number % len(style.LINES)
        style.line(left, table.curve("load", "median_ttft_ms", **where), look, label)
        style.line(right, table.curve("load", "p99_itl_ms", **where), look, label)
    left.set_ylabel("median TTFT, ms")
    right.set_ylabel("P99 gap between tokens, ms")
    for panel in (left, right):
        panel.set_yscale("log")
        panel.set_xlabel("load, share of what 1C can end")
    left.legend(fontsize=7)
    style.save(figure, name, table)
    with open(os.path.join(style.HERE, "out", f"{name}.md"), "w", encoding="utf-8") as file:
        for load in table.distinct("load"):
            file.write(f"Load {load}, {table.stamp['machine']}, commit {table.stamp['commit']}\n\n")
            file.write("| | " + " | ".join(words) + " |\n|---|" + "---:|" * len(words) + "\n")
            for title, column in ROWS:
                cells = [f"{table(column, load=load, **dict(zip(SHAPE, shape))):.2f}" for shape in shapes]
                file.write(f"| {title} | " + " | ".join(cells) + " |\n")
            file.write("\n")
    print(f"paper_figures/out/{name}.md")
