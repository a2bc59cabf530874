"""TTFT by the rate of the links: never, always, by predicted cost, and the best that was found in hindsight."""
import style

table = style.result("fetch_oracle")
loads = table.distinct("load")
figure, panels = style.plt.subplots(1, 3, figsize=(12, 3.4))
rates = sorted(map(float, table.distinct("gbps")))
for panel, load in zip(panels, loads):
    for number, system in enumerate(("never", "always", "cost", "hindsight", "free")):
        style.line(panel, table.curve("gbps", "ttft_mean_s", system=system, load=load), number, {"free": "a wire that takes no time"}.get(system, system))
    panel.set_yscale("log")
    style.plain_log(panel)
    panel.set_ylabel("mean TTFT, s")
    panel.set_title(f"load {load} of the P's if nothing is found", fontsize=9)
for number, load in enumerate(loads):
    for at, gbps in enumerate(rates):
        style.bar(panels[2], at + .4 * number, table, lambda t: t("ttft_mean_s", system="cost", load=load, gbps=gbps) /
                  t("ttft_mean_s", system="hindsight", load=load, gbps=gbps) - 1, width=.38, label=None if at else f"load {load}", **style.FILLS[number])
panels[2].set_xticks([at + .2 for at in range(len(rates))], [f"{rate:g}" for rate in rates])
panels[2].set_ylabel("mean TTFT of cost over hindsight, less 1")
for panel in panels:
    panel.set_xlabel("Gb/s of an instance's link")
for panel in panels[:2]:
    style.powers(panel, rates)
panels[0].legend(fontsize=7)
panels[2].legend(fontsize=7)
style.save(figure, "fetch_oracle", table)
