"""Mooncake's pool on the simulator: hits by where prompts go, TTFT and fetches against the network's rate, the threshold."""
import style

from claims import by_gbps, by_threshold, pooled

table = style.result("mooncake_pool")
figure, panels = style.plt.subplots(1, 4, figsize=(15.5, 3.9))
traces = ("conversation", "tool_agent", "synthetic")
for number, system in enumerate(("random", "prefix", "local", "global", "pool")):
    for at, trace in enumerate(traces):
        style.bar(panels[0], at + .16 * number, table, lambda t: pooled(t, "hit_share", system, trace), width=.15,
                  label=None if at else system, **style.FILLS[number])
panels[0].set_xticks([at + .32 for at in range(3)], ["conversation", "tool&agent\n(generated)", "synthetic"])
panels[0].set_ylabel("hits, 10 P")
for at, trace in enumerate(traces):
    style.bar(panels[1], at, table, lambda t: pooled(t, "hit_share", trace=trace) / pooled(t, "hit_share", "prefix", trace), width=.5, **style.FILLS[0])
style.paper(panels[1], range(3), [2.22, 1.38, 2.36], "Fig. 10", style.known("mooncake_pool", "conversation: hits, global / longest prefix"))
panels[1].set_xticks(range(3), ["conversation", "tool&agent\n(generated)", "synthetic"])
panels[1].set_ylabel("hits, global / longest prefix")
rates = (24, 50, 100, 200, 400)
for at, gbps in enumerate(rates):
    style.bar(panels[2], at, table, lambda t: by_gbps(t, "ttft_mean_s", gbps), width=.7, label=None if at else "mean TTFT", **style.FILLS[0])
    style.bar(panels[2], at, table, lambda t: by_gbps(t, "fetch_took_s", gbps), width=.35, label=None if at else "a fetch", **style.FILLS[1])
style.bar(panels[2], len(rates), table, lambda t: by_gbps(t, "ttft_mean_s", 100, "local"), width=.7, **style.FILLS[0])
panels[2].set_xticks(range(len(rates) + 1), [f"{gbps}" for gbps in rates] + ["none\nfetched"])
panels[2].set_xlabel("Gb/s")
panels[2].set_ylabel("synthetic, 8P8D, s")
thresholds = (1, 1.3, 2, 3, 5, 1e9)
for number, trace in enumerate(("conversation", "synthetic")):
    for at, threshold in enumerate(thresholds):
        style.bar(panels[3], at + .4 * number, table, lambda t: by_threshold(t, threshold, trace), width=.38,
                  label=None if at else trace, **style.FILLS[number])
panels[3].set_xticks([at + .2 for at in range(len(thresholds))], [f"{threshold:g}" for threshold in thresholds[:-1]] + ["endless"])
panels[3].set_xlabel("threshold, 50 Gb/s")
panels[3].set_ylabel("mean TTFT, s")
for panel in (panels[0], panels[2], panels[3]):
    panel.legend(fontsize=6.5)
style.save(figure, "mooncake_pool", table)
