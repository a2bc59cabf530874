"""Mooncake's figures, simulated: requests that meet a TBT objective, schedulers, and the ratio of P to D instances."""
import style

table = style.result("mooncake_serving")
figure, panels = style.plt.subplots(1, 3, figsize=(12.5, 3.9))
traces = ("conversation", "tool_agent", "synthetic")
systems = (("8P8D", "mooncake"), ("16C", "vllm"), ("16C", "vllm_prefix"), ("16C", "vllm_chunked"))
for number, (topology, system) in enumerate(systems):
    for at, trace in enumerate(traces):
        style.bar(panels[0], at + .2 * number, table, lambda t: t(
            "kept_share", figure="tbt", trace=trace, topology=topology, system=system),
                  width=.19, label=None if at else f"{topology}, {system}", **style.FILLS[number])
source = table.stamp.get("tool&agent", "generated")
panels[0].set_xticks([at + .3 for at in range(3)], ["conversation", f"tool&agent\n({source})", "synthetic"])
panels[0].set_ylabel("within 30 s and 100 ms")
schedulers = ("random", "load", "local", "global")
for at, system in enumerate(schedulers):
    style.bar(panels[1], at, table, lambda t: t(
        "ttft_mean_s", figure="schedulers", topology="8P8D", system=system), width=.7, **style.FILLS[0])
style.paper(panels[1], range(4), [19.65, 5.27, 3.58, 3.07], "19.65, 5.27, 3.58, 3.07 s")
panels[1].set_xticks(range(4), schedulers)
panels[1].set_ylabel("conversation: mean TTFT, s")
style.plain_log(panels[1])
shapes = [f"{p}P{16 - p}D" for p in range(5, 12)]
for at, shape in enumerate(shapes):
    style.bar(panels[2], at, table, lambda t: t(
        "kept_share", figure="ratio", trace="synthetic", topology=shape, system="global"), width=.7, **style.FILLS[0])
panels[2].set_xticks(range(len(shapes)), shapes, fontsize=7)
panels[2].set_ylabel("synthetic: within 10 s and 100 ms")
for panel in panels[:2]:
    panel.legend(fontsize=6.5)
style.save(figure, "mooncake_serving", table, "Mooncake (FAST'25) Fig. 5", scene="16 nodes of 8 A800, Llama-3-70B")
