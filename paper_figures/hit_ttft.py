"""Hit rate against TTFT: every router, every rule of fetching at every rate, and nine rounds of a growing prompt."""
import style

from claims import round_of, routed

routers, fetches, rounds = map(style.result, ("routers", "fetch_or_compute", "hit_rounds"))
figure, panels = style.plt.subplots(1, 3, figsize=(13, 3.8))


def dots(panel, points, number, label):
    look = style.LINES[number % len(style.LINES)]
    panel.plot(*zip(*points), label=label, color=look["color"], marker=look["marker"], linestyle="none")


def mean(table, value):
    return style.statistics.mean(value(part) for part in table.samples())


def pairs(table, cell, **where):
    """The point of hits and seconds, means of the samples."""
    return tuple(mean(table, lambda t, column=column: cell(t, column, **where)) for column in ("hit_share", "ttft_mean_s"))


for number, load in enumerate(routers.distinct("load")):
    dots(panels[0], [pairs(routers, routed, placement=row, pool="4P4D", load=load) for row in routers.distinct("placement")],
         number, load.replace("tool_agent", "tool&agent"))
panels[0].set_title("17 routers, 4P4D", fontsize=9)
for number, policy in enumerate(fetches.distinct("policy")):
    dots(panels[1], [pairs(fetches, lambda t, column, **where: t(column, **where), trace="conversation", policy=policy, gbps=float(gbps))
                     for gbps in fetches.distinct("gbps")], number, policy)
panels[1].set_title("--kv-fetch at 10 to 400 Gb/s, conversation", fontsize=9)
rates = sorted(map(float, rounds.distinct("tier_gb_per_s")))
for number, rate in enumerate(rates[1:]):
    dots(panels[2], [(round_of(rounds, "hit_share", n, rate), round_of(rounds, "ttft_mean_s", n, rate)) for n in range(9)],
         number, f"{rate:g} GB/s")
panels[2].axhline(round_of(rounds, "ttft_mean_s", 8, 0), color="0.5", linestyle=":", label="round 8, computed")
panels[2].set_title("nine rounds, read from a tier", fontsize=9)
for panel in panels:
    panel.set_yscale("log")
    style.plain_log(panel)
    panel.set_xlabel("share of prompt tokens found")
    panel.legend(fontsize=6)
panels[0].set_ylabel("mean TTFT, s")
style.save(figure, "hit_ttft", routers)
