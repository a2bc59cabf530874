"""Chunk size against the gaps between tokens and the first token (Sarathi-Serve), on the CPU and on a card."""
import style

for name in ("chunk", "chunk-cuda"):
    try:
        table = style.Table.load(style.path(name))
    except style.TableError as error:
        print(f"not drawn: {error}")
        continue
    figure, (left, right) = style.plt.subplots(1, 2, figsize=(8, 3.3))
    for number, (column, label) in enumerate((("median_itl_ms", "median gap"), ("itl_ms_p90", "P90 gap"),
                                              ("p99_itl_ms", "P99 gap"))):
        if all(table.distinct(column)) and (column != "p99_itl_ms" or table("generated_tokens", chunk=512) >= 2000):
            style.line(left, table.curve("chunk", column), number, label)
    for number, (column, label) in enumerate((("mean_ttft_ms", "mean TTFT"), ("median_ttft_ms", "median TTFT"))):
        if all(table.distinct(column)):  # "": of fewer than 40 requests
            style.line(right, table.curve("chunk", column), number, label)
    for panel in (left, right):
        style.powers(panel, [int(c) for c in table.distinct("chunk")])
        panel.set_xlabel("tokens of a step")
        panel.set_ylabel("ms")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7)
    style.save(figure, name, table)
