"""Gaps between tokens and throughput under three batching policies (Orca; Sarathi-Serve)."""
import style

table = style.result("batching")
policies = table.distinct("policy")
loads = [load for load in table.distinct("load") if float(load) > 0]
figure, panels = style.plt.subplots(1, 3, figsize=(10, 3.3))
for number, policy in enumerate(policies):
    if loads:
        style.quantiles(panels[0], table, number, policy, policy=policy, load=loads[0])
    for panel, column in ((panels[1], "mean_ttft_ms"), (panels[2], "output_throughput")):
        load = loads[0] if loads and panel is panels[1] else "0.0"
        style.bar(panel, number, table, lambda t: t(column, policy=policy, load=load), width=.6, **style.FILLS[number])
for panel in panels[1:]:
    panel.set_xticks(range(len(policies)), policies)
panels[0].set_title(f"load {loads[0]}" if loads else "", fontsize=8)
panels[0].legend(fontsize=7)
panels[1].set_ylabel("mean TTFT, ms")
panels[1].set_title(f"load {loads[0]}" if loads else "", fontsize=8)
panels[2].set_ylabel("tokens/s")
panels[2].set_title("all requests at once", fontsize=8)
style.save(figure, "batching", table)
