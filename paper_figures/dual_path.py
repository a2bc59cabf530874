"""Turns a second of agents at once, by the rate of each instance's link to the store: over P's links, and over D's, too."""
import style

table = style.result("dual_path")
models = table.distinct("model", mode="offline")
figure, panels = style.plt.subplots(1, len(models), figsize=(9, 3.4))
for panel, model in zip(panels, models):
    for number, (topology, path) in enumerate((t, p) for t in table.distinct("topology", mode="offline") for p in table.distinct("path")):
        curve = table.curve("store_gbps", "rate", mode="offline", model=model, topology=topology, path=path, net_gbps=3200.0)
        if curve:
            style.line(panel, curve, number, f"{topology} {path}")
    style.powers(panel, sorted(map(float, table.distinct("store_gbps"))))
    panel.set_xlabel("Gb/s of an instance's link to the store")
    panel.set_title(f"{model}: turns/s", fontsize=9)
    panel.set_yscale("log")
    style.plain_log(panel)
panels[0].legend(fontsize=7)
style.save(figure, "dual_path", table)
