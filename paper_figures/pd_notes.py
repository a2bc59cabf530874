"""Two claims of the notes: first tokens and tails of gaps by load, P/D against as many colocated instances."""
import style

table = style.result("pd_notes")
figure, panels = style.plt.subplots(2, 2, figsize=(8.6, 6), sharex=True)
for column, note in enumerate(table.distinct("note")):
    for row, (what, label) in enumerate((("ttft_mean_s", "mean TTFT, s"), ("tbt_mean_s", "mean of the longest tenth of gaps, s"))):
        for number, system in enumerate(table.distinct("system")):
            style.line(panels[row][column], table.curve("load", what, note=note, system=system), number, system.replace("_", " "))
        panels[row][column].set_ylabel(label)
        style.plain_log(panels[row][column])
    panels[0][column].set_title(note, fontsize=9)
    panels[1][column].set_xlabel("load, share of what P computes")
panels[0][0].legend(fontsize=7)
style.save(figure, "pd_notes", table)
