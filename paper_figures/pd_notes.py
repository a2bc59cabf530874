"""Eight L40: 4P4D beside TP8 with the schedules of vLLM's V0 and V1. It shows the published latencies and those that follow from
the cards' specifications, for both kinds of links. The second panel shows a growing batch on three machines."""
import style

table = style.result("pd_notes-table")
figure, panels = style.plt.subplots(1, 2, figsize=(9.2, 3.4))
# The published latencies in ms, from the table of the xPyD notes. It has none of V1.
PUBLISHED = {"mean TPOT": (58, 72, None), "median TPOT": (51, 43, None), "P99 of TPOT": (162, 307, None), "mean ITL": (46, 39, None)}
COLUMNS = {"mean TPOT": "tpot_mean_ms", "median TPOT": "tpot_p50_ms", "P99 of TPOT": "tpot_p99_ms", "mean ITL": "itl_mean_ms"}
SYSTEMS = ("4P4D", "TP8 V0", "TP8 V1")
for at, (name, column) in enumerate(COLUMNS.items()):
    for number, system in enumerate(SYSTEMS):
        x = at + .26 * (number - 1)
        for links, mark in (("pairs", "o"), ("pcie", "_")):
            panels[0].plot(x, table(column, note="eight L40", system=system, links=links), mark, color=style.COLORS[number],
                           label=f"{system}, {links}" if at == 0 else None)
        if PUBLISHED[name][number]:
            style.paper(panels[0], x, PUBLISHED[name][number], "eight figures", style.known("pd_notes/table", "eight L40, pairs: mean TPOT, 4P4D"))
panels[0].set_xticks(range(len(COLUMNS)), list(COLUMNS), fontsize=7)
panels[0].set_ylabel("ms")
style.plain_log(panels[0])
panels[0].legend(fontsize=6)
for number, system in enumerate(("V100", "L40 TP8", "R1 TP16")):
    style.line(panels[1], table.curve("batch", "output_per_s", note="batch", system=system), number, system)
style.powers(panels[1], [1, 4, 16, 64, 256])
panels[1].set_xlabel("batch")
panels[1].set_ylabel("tokens/s")
panels[1].legend(fontsize=7)
style.save(figure, "pd_notes", table)
