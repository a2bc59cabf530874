"""Who computes a conversation's next turn: time until D's first token and TPOT, by the order of P and D, and by load."""
import style

from claims import turned

table = style.result("append_prefill")
systems = ("prefill_first", "conditional_threshold", "conditional_cost", "append_cost", "oracle")
figure, panels = style.plt.subplots(1, 3, figsize=(12, 3.6))
loads = (60.0, 15.0, 8.0)
for panel, (column, topology, times, label) in zip(panels, (("first_s", "1P1D", 1, "1P1D: until D's first token, mean, s"),
                                                           ("first_s", "2P2D", 1, "2P2D: until D's first token, mean, s"),
                                                           ("tpot_s", "2P2D", 1e3, "2P2D: TPOT, mean, ms"))):
    for number, system in enumerate(systems):
        for at, apart in enumerate(loads):
            style.bar(panel, at + .16 * number, table, lambda t: times * turned(t, column, system, apart, topology), width=.15,
                      label=None if at else {"oracle": "best fixed length"}.get(system, system.replace("_", " ")), **style.FILLS[number])
    panel.set_xticks([at + .32 for at in range(len(loads))], [f"every {apart:g} s" for apart in loads])
    panel.set_ylabel(label)
    panel.set_xlabel("sessions begin")
for panel in panels[:2]:
    panel.set_yscale("log")
    style.plain_log(panel)
panels[0].legend(fontsize=7, loc="upper left")
style.save(figure, "append_prefill", table)
