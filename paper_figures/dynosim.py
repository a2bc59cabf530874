"""DynoSim's router figures: eight workers in a closed loop, round robin, their router, Algorithm 1."""
import style

from claims import looped

table = style.result("dynosim")
routers, loops = table.distinct("placement"), table.distinct("concurrency")
figure, panels = style.plt.subplots(1, 3, figsize=(10, 3.4))
for panel, column, label in zip(panels, ("hit_share", "ttft_mean_s", "requests_per_s"), ("reuse", "mean TTFT, s", "requests/s")):
    for number, router in enumerate(routers):
        for at, loop in enumerate(loops):
            style.bar(panel, at + .26 * number, table, lambda t: looped(t, column, router, loop), width=.25,
                      label=None if at else router.replace("_", " "), **style.FILLS[number])
    panel.set_xticks([at + .26 for at in range(len(loops))], [f"{loop} at once" for loop in loops])
    panel.set_ylabel(label)
panels[1].legend(fontsize=7)
style.save(figure, "dynosim", table)
