"""What a window of chunks in flight is worth, and how far it explains SGLang's figures: errors of what was left out, by window."""
import style

table, sweep = style.result("cpp_window"), style.result("cpp_window_sweep")
figure, panels = style.plt.subplots(1, 3, figsize=(13, 3.7))
windows = table.distinct("window")
for number, model in enumerate(table.distinct("model")):
    for column, words, fill in (("error", "fitted", .5), ("left_out_error", "left out", 1)):
        worst = [max(abs(v) for v in table.values(column, model=model, window=w, base="own", fit="all")) for w in windows]
        at = [x + .4 * number - .2 + .2 * (fill == 1) - .1 for x in range(len(windows))]
        panels[0].bar(at, [100 * v for v in worst], .19, label=f"{model}, {words}", alpha=fill, **style.FILLS[number])
panels[0].set_xticks(range(len(windows)), [w if w in ("none", "slots") else f"W = {w}" for w in windows], fontsize=8)
panels[0].set_ylabel("largest error, % of the published figure")
panels[0].legend(fontsize=7)
what = table.distinct("what", model="qwen3-235b")
for number, window in enumerate(("P", "P+1", "2P", "none")):
    rows = [table("error", model="qwen3-235b", window=window, base="own", fit="all", what=w) for w in what]
    style.line(panels[1], [(x, 100 * v, 100 * v, 100 * v) for x, v in enumerate(rows)], number, window if window == "none" else f"W = {window}")
panels[1].axhline(0, color="black", linewidth=.8)
panels[1].set_xticks(range(len(what)), what, fontsize=7)
panels[1].set_ylabel("error, %, Qwen3-235B, all six fitted")
panels[1].legend(fontsize=7)
order = [8, 9, 10, 12, 16, 0]
for number, chunks in enumerate(sweep.distinct("chunks")):
    for queued, more in ((16, {}), (1, {"alpha": .35})):
        curve = [(x, *3 * (100 * sweep("efficiency", queued=queued, chunks=chunks, window=w),)) for x, w in enumerate(order)]
        style.line(panels[2], curve, number, chunks if queued == 16 else None, **more)
panels[2].set_xticks(range(len(order)), [str(w or "none") for w in order])
panels[2].set_xlabel("chunks in flight, P = 8 (pale: one prompt)")
panels[2].set_ylabel("efficiency, %")
panels[2].legend(fontsize=7)
style.save(figure, "cpp_window", table)
