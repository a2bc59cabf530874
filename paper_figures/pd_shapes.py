"""Bytes, messages and their size between prefill instances of tp a and decode instances of tp b."""
import style

table = style.result("pd_shapes")
WHAT = [("bytes_over_unique", "bytes / unique KV"), ("most_sent_share", "share sent by the busiest rank"),
        ("nhd_message_bytes", "bytes of a message, NHD"), ("hnd_message_bytes", "bytes of a message, HND")]
where = {"kv_heads": 8, "replicas": "spread"}
ranks = table.distinct("p_tp", **where)
figure, panels = style.plt.subplots(1, 4, figsize=(14, 3.9))
for panel, (column, title) in zip(panels, WHAT):
    cells = [[table.values(column, p_tp=a, d_tp=b, **where)[0] for b in ranks] for a in ranks]
    panel.imshow(cells, cmap="cividis", aspect="equal", norm="log",
                 alpha=.55)
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            text = f"{value / 1024:.3g}K" if value >= 1024 else f"{value:.3g}"
            panel.text(x, y, text, ha="center", va="center", fontsize=5.5)
    panel.set_xticks(range(len(ranks)), ranks)
    panel.set_yticks(range(len(ranks)), ranks)
    panel.grid(False)
    panel.set_xlabel("tp of D")
    panel.set_title(title, fontsize=9)
panels[0].set_ylabel("tp of P")
style.save(figure, "pd_shapes", table)
