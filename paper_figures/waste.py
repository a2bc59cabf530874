"""Where the bytes of a full KV pool go (PagedAttention Fig. 2), and how many sequences fit (Fig. 13a), against block
size."""
import style

BLOCKS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
PARTS = [("useful_share", "holds KV"), ("reserved_share", "reserved"), ("internal_share", "internal"),
         ("free_share", "free, unusable")]
# SOSP'23: share of KV bytes that hold tokens, Fig. 2; sequences at once relative to Orca (Max), section 6.2.
PUBLISHED = [(0, .204, "Orca (Max)"), (0, .268, "(Pow2)"), (0, .382, "(Oracle)"), (5, .963, "vLLM")]
PUBLISHED_BATCH = (5, 4.3)

table = style.result("waste")
figure, panels = style.plt.subplots(1, 3, figsize=(10, 3.4), gridspec_kw={"width_ratios": [3, 3, 2.4]})
for panel, dataset in zip(panels, ("sharegpt", "mooncake")):
    bottom = [0.0] * 10
    for (column, label), fill in zip(PARTS, style.FILLS):
        heights = [table(column, dataset=dataset, allocator="contiguous", block=0)]
        heights += [table(column, dataset=dataset, allocator="paged", block=b) for b in BLOCKS]
        panel.bar(range(10), heights, bottom=bottom, label=label, width=.75, linewidth=.6, **fill)
        bottom = [b + h for b, h in zip(bottom, heights)]
    panel.set_xticks(range(10), ["slot"] + BLOCKS, fontsize=8)
    panel.set_xlabel("tokens of a block")
    panel.set_title(f"{dataset}, lengths: {table.select(dataset=dataset)[0]['lengths']}\n"
                    f"{table.select(dataset=dataset)[0]['scene']}", fontsize=8)
panels[0].set_ylabel("share of the KV pool")
for at, share, name in PUBLISHED:
    panels[0].plot(at + .28, share, **style.PAPER)
    panels[0].annotate(name, (at + .55, share), fontsize=6.5, va="center",
                       bbox={"facecolor": "white", "edgecolor": "none", "pad": .5, "alpha": .85})
panels[1].legend(loc="lower right", fontsize=7, frameon=True, framealpha=.95)
for number, dataset in enumerate(("sharegpt", "mooncake")):
    slots = table("batch_mean", dataset=dataset, allocator="contiguous", block=0)
    curve = [(b, *(v / slots for v in rest)) for b, *rest in table.curve("block", "batch_mean", dataset=dataset,
                                                                         allocator="paged")]
    style.line(panels[2], curve, number, dataset)
    rows = [(float(r["block"]), float(r["batch_mean"]) / slots)
            for r in table.select(dataset=dataset, allocator="vattention")]
    panels[2].plot(*zip(*rows), marker="x", color="0.3", linestyle="none",
                   label=None if number else "vattention, tokens of a row")
panels[2].plot(BLOCKS[PUBLISHED_BATCH[0] - 1], PUBLISHED_BATCH[1], **style.PAPER)
style.powers(panels[2], BLOCKS)
panels[2].set_ylim(bottom=0)
panels[2].set_xlabel("tokens of a block")
panels[2].set_ylabel("sequences at once / with slots")
panels[2].legend(fontsize=7)
style.save(figure, "waste", table, "PagedAttention (SOSP'23) Fig. 2 and section 6.2, OPT-13B, ShareGPT, A100")
