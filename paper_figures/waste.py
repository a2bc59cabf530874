"""The use of a full KV pool's bytes (PagedAttention Fig. 2) and the number of sequences that fit (Fig. 13a), by block
size."""
import style

BLOCKS = [1, 4, 16, 64, 256]
PARTS = [("useful_share", "holds KV"), ("reserved_share", "reserved"), ("internal_share", "internal"),
         ("free_share", "free, unusable")]
LOOKS = [style.FILLS[0], style.FILLS[2], style.FILLS[1], style.FILLS[3]]
# SOSP'23: share of KV bytes that hold tokens, Fig. 2 (slots of the maximum length; blocks of 16). The number of
# concurrent sequences is relative to Orca (Max), section 6.2.
PUBLISHED = [(0, .204), (BLOCKS.index(16) + 1, .963)]
PUBLISHED_BATCH = (16, 4.3)

table = style.result("waste")
figure, panels = style.plt.subplots(1, 3, figsize=(12, 4.3), gridspec_kw={"width_ratios": [3, 3, 2.6]})
for panel, dataset in zip(panels, ("sharegpt", "mooncake")):
    bottom = [0.0] * (len(BLOCKS) + 1)
    for (column, label), look in zip(PARTS, LOOKS):
        heights = [table(column, dataset=dataset, allocator="contiguous", block=0)]
        heights += [table(column, dataset=dataset, allocator="paged", block=b) for b in BLOCKS]
        panel.bar(range(len(heights)), heights, bottom=bottom, label=label, width=.8, **look)
        bottom = [b + h for b, h in zip(bottom, heights)]
    panel.set_xticks(range(len(BLOCKS) + 1), ["slot", *BLOCKS], rotation=45)
    panel.set_xlabel("tokens of a block")
    panel.set_ylim(0, 1.04)
    row = table.select(dataset=dataset)[0]
    panel.set_title(f"{dataset} ({row['lengths']} lengths)\n{row['scene']}", fontsize=9)
panels[0].set_ylabel("share of the KV pool")
style.paper(panels[0], *zip(*PUBLISHED), "20.4 % (Orca Max), 96.3 % (vLLM)")
panels[0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -.32), ncol=3)
for number, dataset in enumerate(("sharegpt", "mooncake")):
    slots = table("batch_mean", dataset=dataset, allocator="contiguous", block=0)
    style.line(panels[2], [(b, *(v / slots for v in rest)) for b, *rest in
                           table.curve("block", "batch_mean", dataset=dataset, allocator="paged")], number, dataset)
    rows = table.curve("block", "batch_mean", dataset=dataset, allocator="vattention")
    rows = [(b, batch / slots) for b, batch, *_ in rows]
    panels[2].plot(*zip(*rows), marker="s", markersize=7, markerfacecolor="none", color=style.COLORS[number],
                   linestyle="none", label=f"{dataset}, vattention (rows)")
style.paper(panels[2], *PUBLISHED_BATCH, "4.3 x at blocks of 16")
style.powers(panels[2], [1, 4, 16, 64, 256])
panels[2].set_ylim(bottom=0)
panels[2].set_xlabel("tokens of a block, or of a row")
panels[2].set_ylabel("sequences at once / with slots")
panels[2].legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, -.28), ncol=2)
for panel in (panels[0], panels[2]):
    panel.get_legend().set_in_layout(False)
style.save(figure, "waste", table, "PagedAttention (SOSP'23) Fig. 2 and section 6.2, OPT-13B, ShareGPT, A100",
           scene="12 GiB of KV, OPT-13B, a model that computes nothing", bottom=.2)
