"""TTFT and ITL by load, colocated and disaggregated. The script also writes the table of vLLM's benchmark with one column a
topology, as the xPyD notes print it (paper_figures/out/pd.md)."""
import os

import style

ROWS = [("Request throughput (req/s)", "request_throughput"), ("Output token throughput (tok/s)", "output_throughput"),
        ("Mean TTFT (ms)", "mean_ttft_ms"), ("Median TTFT (ms)", "median_ttft_ms"),
        ("Mean TPOT (ms)", "mean_tpot_ms"), ("Median TPOT (ms)", "median_tpot_ms"),
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
    enough = float(table.rows[0]["generated_tokens"]) >= 2000  # gaps that a P99 needs
    tail, tail_words = ("p99_itl_ms", "P99") if enough else ("itl_ms_p95", "P95")
    figure, (left, right) = style.plt.subplots(1, 2, figsize=(9, 3.9))
    loads = sorted(float(load) for load in table.distinct("load"))
    for number, (shape, label) in enumerate(zip(shapes, words)):
        where = dict(zip(SHAPE, shape))
        look = number % len(style.LINES)
        for panel, column in ((left, "mean_ttft_ms"), (right, tail)):
            shifted = [(x + .006 * (number - 2), *rest) for x, *rest in table.curve("load", column, **where)]
            style.line(panel, shifted, look, label)
    left.set_ylabel("mean TTFT, ms")
    right.set_ylabel(f"{tail_words} gap between tokens, ms")
    for panel in (left, right):
        style.plain_log(panel)
        panel.set_xticks(loads, [f"{load:g}" for load in loads])
        panel.set_xlabel("load, share of what 1C can end")
    left.legend(fontsize=7)
    style.save(figure, name, table)
    with open(os.path.join(style.HERE, "out", f"{name}.md"), "w", encoding="utf-8") as file:
        for load in table.distinct("load"):
            file.write(f"Load {load}, {table.stamp['machine']}, commit {table.stamp['commit']}\n\n")
            file.write("| | " + " | ".join(words) + " |\n|---|" + "---:|" * len(words) + "\n")
            for title, column in ROWS:
                if column == "p99_itl_ms" and not enough or "" in table.distinct(column):
                    continue
                cells = [f"{table(column, load=load, **dict(zip(SHAPE, shape))):.2f}" for shape in shapes]
                file.write(f"| {title} | " + " | ".join(cells) + " |\n")
            file.write("\n")
    print(f"paper_figures/out/{name}.md")
