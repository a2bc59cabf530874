"""Three ways to share a common prefix on contiguous memory, and hashed blocks: time to attach, bytes held, TTFT."""
import style

table = style.result("sharing")
ways = ["alias", "copy", "takeover", "blocks"]
figure, panels = style.plt.subplots(1, 3, figsize=(10.5, 3.3))
for number, way in enumerate(ways):
    for panel, column in ((panels[0], "attach_us"), (panels[1], "held_mib")):
        style.line(panel, table.curve("prefix", column, phase="attach", way=way), number, way)
for panel, label in ((panels[0], "reserve(), us"), (panels[1], "MiB of 9 sequences")):
    style.powers(panel, [64, 256, 1024, 4096])
    style.plain_log(panel)
    panel.set_xlabel("prefix, tokens of 32 KiB")
    panel.set_ylabel(label)
    panel.legend(fontsize=7)
prefixes = [int(p) for p in table.distinct("prefix") if table.select(phase="serve", way="off", prefix=p)]
bars = ["off"] + ways
for number, way in enumerate(bars):
    for at, p in enumerate(prefixes):
        style.bar(panels[2], at + (number - 2) * .16, table, lambda t: t("ttft_ms", phase="serve", way=way, prefix=p) /
                  t("ttft_ms", phase="serve", way="off", prefix=p), width=.15, label=None if at else way, **style.FILLS[number])
panels[2].set_xticks(range(len(prefixes)), prefixes)
panels[2].set_xlabel("prefix, tokens; 128 more of each")
panels[2].set_ylabel("TTFT of four at once / off")
panels[2].legend(fontsize=7, ncol=2)
style.save(figure, "sharing", table)
