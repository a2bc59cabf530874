"""TTFT and hits by link rate, if prefixes are fetched never, always, or whenever that takes less time than computing
them."""
import style

table = style.result("fetch_or_compute")
figure, panels = style.plt.subplots(1, 4, figsize=(14, 3.4))
rates = sorted(map(float, table.distinct("gbps")))
for at, (column, trace) in enumerate((c, t) for t in table.distinct("trace") for c in ("ttft_mean_s", "hit_share")):
    for number, policy in enumerate(table.distinct("policy")):
        style.line(panels[at], table.curve("gbps", column, policy=policy, trace=trace), number, policy)
    style.powers(panels[at], rates)
    panels[at].set_xlabel("Gb/s of an instance's link")
    title = "mean TTFT, s" if column == "ttft_mean_s" else "share of prompt tokens found"
    panels[at].set_title(f"{trace}: {title}", fontsize=9)
    if column == "ttft_mean_s":
        panels[at].set_yscale("log")
        style.plain_log(panels[at])
panels[0].legend(fontsize=7)
style.save(figure, "fetch_or_compute", table, scene="16 nodes of 8 A800, Llama-3-70B")
