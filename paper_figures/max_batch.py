"""Sequences that fit by the size of a page group, and the waste of each one's last row (vAttention Fig. 15, Table 8)."""
import style

MEMORIES = [("paged", 0, "blocks\nof 16"), ("layer_major", 64, "64\nKiB"), ("layer_major", 128, "128\nKiB"),
            ("layer_major", 256, "256\nKiB"), ("layer_major", 2048, "2\nMiB"), ("token_major", 2048, "2 MiB,\nsliced")]
# ASPLOS'25 Fig. 15: 64 KiB and 2 MiB.
PUBLISHED = {"Yi-6B": (240, 187), "Llama-3-8B TP-2": (258, 203), "Yi-34B TP-2": (68, 56)}

table = style.result("max_batch")
figure, panels = style.plt.subplots(1, 4, figsize=(13, 3.9))
for panel, (model, published) in zip(panels, PUBLISHED.items()):
    for at, (memory, group, _) in enumerate(MEMORIES):
        fill = style.FILLS[2 if memory == "token_major" else 1 if memory == "paged" else 0]
        style.bar(panel, at, table, lambda t: t("batch", model=model, memory=memory, group_kib=group), width=.7, **fill)
    style.paper(panel, (1, 4), published, f"{published[0]}, {published[1]}", style.known("max_batch", model))
    panel.set_title(model, fontsize=8)
for number, model in enumerate(PUBLISHED):
    curve = table.curve("group_kib", "wasted_mib_each", model=model, memory="layer_major")
    style.line(panels[3], curve, number, model)
    curve = table.curve("group_kib", "wasted_mib_worst", model=model, memory="layer_major")
    panels[3].plot([x for x, *_ in curve], [y for _, y, *_ in curve], color="0.6", linestyle=":", linewidth=1)
for panel in panels[:3]:
    panel.set_xticks(range(len(MEMORIES)), [label for *_, label in MEMORIES], fontsize=6.5)
panels[0].set_ylabel("sequences of 2,048 to 5,119 tokens")
panels[3].set_yscale("log")
style.powers(panels[3], [64, 128, 256, 2048], ["64", "128", "256 KiB", "2 MiB"])
panels[3].set_ylabel("MiB wasted by each (dotted: at most)")
panels[3].set_xlabel("page group, a tensor per layer")
panels[3].legend(fontsize=6.5)
style.save(figure, "max_batch", table, "vAttention (ASPLOS'25) Fig. 15, Table 8; memory and lengths are assumed: max_batch.cc")
