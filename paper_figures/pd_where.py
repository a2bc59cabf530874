"""The region in which P/D beats the same number of colocated instances: the ratio of their goodputs, by prompt, output and TBT objective."""
import style

table = style.result("pd_where")
tbts = sorted(map(float, table.distinct("tbt")))
base = {"hardware": "a800x8", "gbps": 100.0}
prompts = sorted(map(int, table.distinct("prompt", **base)))
outputs = sorted(map(int, table.distinct("output", **base)))
figure, panels = style.plt.subplots(1, len(outputs) + 1, figsize=(13, 3.8), sharey=True)
for panel, output in zip(panels, outputs):
    for number, prompt in enumerate(prompts):
        curve = [point for point in table.curve("tbt", "gain", prompt=prompt, output=output, **base) if 0 < point[1] < 99]
        style.line(panel, curve, number, f"prompts of {prompt:,}")
    panel.set_title(f"outputs of {output}, 8 x A800, Llama-3-70B", fontsize=9)
    panel.legend(fontsize=6.5)
for number, hardware in enumerate(table.distinct("hardware")):
    style.line(panels[-1], table.curve("tbt", "gain", prompt=4096, output=128, hardware=hardware, gbps=100.0), number, hardware)
style.line(panels[-1], table.curve("tbt", "gain", prompt=4096, output=128, hardware="a800x8", gbps=10.0), 4, "a800x8, 10 Gb/s")
panels[-1].set_title("prompts of 4,096, outputs of 128", fontsize=9)
panels[-1].legend(fontsize=6.5)
for panel in panels:
    panel.axhline(1, color="black", linewidth=.8)
    panel.set_xscale("log")
    panel.set_xticks(tbts, [f"{tbt:g}" for tbt in tbts])
    panel.minorticks_off()
    panel.set_ylim(0, 4)
    panel.set_xlabel("objective of TBT, in bare steps")
panels[0].set_ylabel("goodput, best xPyD / best 4C")
style.save(figure, "pd_where", table)
