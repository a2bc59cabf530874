"""Time to the first token of later turns against the length of the conversation: kept in slots, in blocks, or computed
again (TurboMind's slots)."""
import style

table = style.result("multi_turn")
figure, panels = style.plt.subplots(1, 2, figsize=(8, 3.3), sharey=True)
histories = sorted(int(h) for h in table.distinct("history"))
for panel, conversations in zip(panels, sorted(table.distinct("conversations"), key=int)):
    for number, allocator in enumerate(("slots", "paged", "contiguous")):
        style.line(panel, table.curve("history", "ttft_ms", conversations=conversations, allocator=allocator), number,
                   allocator)
    style.powers(panel, histories)
    panel.set_xlabel("tokens of the first prompt")
    panel.set_title(f"{conversations} conversations in turn, pool of 4 slots", fontsize=8)
style.plain_log(panels[0])
panels[0].set_ylabel("TTFT of later turns, ms")
panels[0].legend(fontsize=7)
style.save(figure, "multi_turn", table)
