"""How much the prompts of the Mooncake traces repeat: the radix-tree metric over N and L (xPyD notes)."""
import style

table = style.result("prefix_repetition")
figure, panels = style.plt.subplots(1, 2, figsize=(8.4, 3.3), sharey=True)
for panel, trace in zip(panels, table.distinct("trace")):
    for number, (column, length) in enumerate((("r_conv", 0), ("r_conv", 2048), ("r_leaf", 0), ("r_leaf", 2048))):
        style.line(panel, table.curve("min_count", column, trace=trace, min_length=length), number,
                   f"{'R_conv' if column == 'r_conv' else 'R_leaf'}, L {length}")
    # FAST'25 Table 2: share of tokens found by an unlimited cache.
    published = {"conversation": .40, "synthetic": .66}[trace]
    panel.axhline(table.values("token_reuse", trace=trace)[0], color="black", linewidth=1, label="tokens reused")
    panel.axhline(published, color="black", linestyle=":", label=f"paper{style.known('prefix_repetition', 'tokens an unlimited cache finds, ' + trace)}: {100 * published:.0f} %")
    panel.set_xscale("log")
    panel.set_xlabel("N: prompts that share the prefix, at least")
    panel.set_title(trace, fontsize=8)
panels[0].set_ylabel("share of the prompts")
panels[0].legend(fontsize=6.5)
style.save(figure, "prefix_repetition", table, "Mooncake (FAST'25) Table 2")
