"""Slots over time: which conversation's KV each holds and how much, and how many slots have memory (TurboMind's slots)."""
import style

table = style.result("slots-time")
figure, panels = style.plt.subplots(7, 1, figsize=(8, 6), sharex=True, gridspec_kw={"height_ratios": [1] * 6 + [1.6]})
ticks = [row for row in table.select(prealloc="none") if int(row["sample"]) == 0]
ticks.sort(key=lambda row: int(row["tick"]))
for slot, panel in enumerate(panels[:6]):
    begin = 0
    cells = [row[f"slot_{slot}"].split() for row in ticks]
    for end in range(1, len(cells) + 1):  # one segment per conversation
        if end < len(cells) and cells[end][0] == cells[begin][0]:
            continue
        owner = cells[begin][0]
        if owner != "-":
            tokens = [int(cell[1]) for cell in cells[begin:end]]
            color = style.COLORS[(ord(owner) - ord("a")) % len(style.COLORS)]
            panel.fill_between(range(begin, end), tokens, step="post", color=color, alpha=.6, linewidth=0)
            panel.text(begin, 60, owner, fontsize=7)
        begin = end
    panel.set_ylim(0, 1024)
    panel.set_yticks([0, 1024])
    panel.set_ylabel(f"slot {slot}", fontsize=7)
for number, prealloc in enumerate(("none", "2", "all")):
    rows = sorted((int(r["tick"]), float(r["slots_with_memory"])) for r in table.select(prealloc=prealloc) if int(r["sample"]) == 0)
    panels[6].step(*zip(*rows), where="post", color=style.COLORS[number], label=f"--slot-prealloc {prealloc}")
panels[6].set_ylabel("with memory", fontsize=7)
panels[6].set_xlabel("ticks of eight tokens of each reply")
panels[6].set_xlim(0, len(ticks))
panels[6].set_ylim(0, 6.4)
panels[6].legend(fontsize=7, loc="lower right")
style.save(figure, "slots", table)
