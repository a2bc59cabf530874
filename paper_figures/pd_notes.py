"""Two V100: first tokens and tails of gaps by load, P/D against as many colocated instances."""
import style

table = style.result("pd_notes")
figure, panels = style.plt.subplots(1, 2, figsize=(8.6, 3.2))
for panel, (what, label) in zip(panels, (("ttft_mean_s", "mean TTFT, s"), ("tbt_mean_s", "mean of the longest tenth of gaps, s"))):
    for number, system in enumerate(table.distinct("system")):
        style.line(panel, table.curve("load", what, system=system), number, system.replace("_", " "))
    panel.set_ylabel(label)
    style.plain_log(panel)
    panel.set_xlabel("load, share of what P computes")
panels[0].legend(fontsize=7)
style.save(figure, "pd_notes", table)
