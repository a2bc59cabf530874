"""Hits of one prefix cache on Mooncake's traces, by capacity and eviction policy (as Mooncake's Fig. 9)."""
import style

table = style.result("mooncake_traces-eviction")
figure, panels = style.plt.subplots(1, 2, figsize=(9, 3.7), sharey=True)
for panel, trace in zip(panels, table.distinct("trace")):
    for number, policy in enumerate(table.distinct("policy")):
        style.line(panel, table.curve("capacity_tokens", "token_hits", trace=trace, policy=policy), number, policy.replace("_", " "))
    panel.axvline(3e6, color="black", linestyle=":", linewidth=.8)
    panel.set_xscale("log")
    panel.set_xlabel("capacity, tokens (dotted: 3 M)")
    panel.set_title(trace, fontsize=9)
panels[0].set_ylabel("tokens found")
panels[0].legend(fontsize=7)
style.save(figure, "mooncake_traces", table)
