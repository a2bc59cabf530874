"""How long the second token waits for the transfer of its prompt's KV, by link rate and by the grain of the transfer: in
milliseconds, and in transfer times of one layer."""
import style

table = style.result("transfer_exposed")
GRAINS = [("layer", "layer by layer"), ("chunk", "chunk by chunk"), ("request", "whole request"), ("pull", "D pulls")]
figure, panels = style.plt.subplots(1, 2, figsize=(9, 3.4))
for panel, (step, column) in zip(panels, [("1024", "exposed_ms"), ("4096", "exposed_layers")]):
    for number, (grain, label) in enumerate(GRAINS):
        style.line(panel, table.curve("gbps", column, grain=grain, step=step, behind="no"), number, label)
    panel.set_xscale("log")
    panel.set_xticks([1, 10, 25, 50, 100, 400], ["1", "10", "25", "50", "100", "400"])
    panel.minorticks_off()
    style.plain_log(panel)
    panel.set_xlabel("wire, Gb/s")
    panel.set_title(f"4,096 tokens in steps of {int(step):,}", fontsize=9)
panels[0].set_ylabel("exposed, ms")
panels[1].set_ylabel("exposed, layers' worth of transfer")
panels[1].axhline(1.3, color="black", linewidth=.8, linestyle=":")
panels[0].legend(fontsize=7)
style.save(figure, "transfer_exposed", table)
