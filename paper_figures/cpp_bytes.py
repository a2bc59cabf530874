"""What each GPU sends per token of a prompt, and its share of a NIC at the rate of the machine."""
import style

table = style.result("cpp_bytes")
schemes = table.distinct("scheme")
figure, (left, right) = style.plt.subplots(1, 2, figsize=(8.6, 3.4))
for number, model in enumerate(table.distinct("model")):
    at = [x + .4 * number - .2 for x in range(len(schemes))]
    cards = table.distinct("hardware", model=model)[0].rpartition("x")[2]
    words = f"{model}, {cards} H100"
    left.bar(at, [table("sent_kb", model=model, scheme=s) for s in schemes], .38, label=words, **style.FILLS[number])
    right.bar(at, [100 * table("nic_share", model=model, scheme=s) for s in schemes], .38, label=words, **style.FILLS[number])
    right.axhline(100 * table("kv_share", model=model, scheme="cpp"), color=style.COLORS[number], linestyle=":",
                  label=f"its KV to D: {100 * table('kv_share', model=model, scheme='cpp'):.1f} %")
right.axhline(100, color="black", linewidth=.8)
left.set_ylabel("KiB sent per token and GPU")
right.set_ylabel("% of 400 Gb/s")
for panel in (left, right):
    panel.set_xticks(range(len(schemes)), schemes)
    panel.legend(fontsize=7)
    style.plain_log(panel)
style.save(figure, "cpp_bytes", table)
