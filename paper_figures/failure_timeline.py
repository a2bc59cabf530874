"""Tokens a second before and after the death of a worker process."""
from statistics import median

import style

table = style.result("failure_timeline")
victims = table.distinct("victim")
figure, panels = style.plt.subplots(len(victims), 1, figsize=(7, 1.5 * len(victims)), sharex=True)
for panel, victim in zip(panels, victims):
    for repeat in table.distinct("repeat"):
        rows = table.select(victim=victim, repeat=repeat)
        panel.step([float(r["from_ms"]) / 1e3 for r in rows], [float(r["tokens_per_s"]) for r in rows], where="post",
                   linewidth=1, color=style.COLORS[int(repeat) % 3])
    panel.axvline(0, color="0.5", linewidth=.8, linestyle=":")
    for column, mark in (("noticed_ms", "v"), ("joined_ms", "^")):
        at = median(table.values(column, victim=victim))
        if at >= 0:
            panel.plot([at / 1e3], [0], marker=mark, color="black", clip_on=False, linestyle="none", label=column[:-3])
    panel.set_title(victim, fontsize=8, loc="left")
    panel.set_ylim(bottom=0)
    panel.set_ylabel("tokens/s", fontsize=8)
panels[0].legend(fontsize=7, ncol=2)
panels[-1].set_xlabel("seconds since the signal")
style.save(figure, "failure_timeline", table)
