"""Blocks or bytes: decode attention by block size with the number of blocks held, as vAttention's Fig. 3 held it, and
with the bytes held."""
import style

# ASPLOS'25 Fig. 3: time over that of blocks of 16, 1,024 blocks whatever their size, A100.
PUBLISHED = [(64, 1.9), (128, 1.9)]
LABELS = {"blocks": "128 blocks (published: 1,024)", "bytes": "128 MiB of blocks", "cached": "4 MiB of blocks"}

table = style.result("block_size")
figure, (left, right) = style.plt.subplots(1, 2, figsize=(8.4, 3.5))
blocks = [int(b) for b in table.distinct("block")]
for number, (held, label) in enumerate(LABELS.items()):
    base = table("ms", held=held, block=16)
    curve = [(b, *(v / base for v in rest)) for b, *rest in table.curve("block", "ms", held=held)]
    style.line(left, curve, number, label)
style.paper(left, *zip(*PUBLISHED), "up to 1.9 x", style.known("block_size", "128 blocks, of 128 tokens"))
left.axhline(1, color="0.4", linestyle=":")
style.powers(left, blocks)
left.set_xlabel("tokens of a block")
left.set_ylabel("time / with blocks of 16")
left.legend(fontsize=7)
style.line(right, table.curve("pool_mib", "gbps", held="blocks"), 0, "a fixed number of blocks")
for held, shade in (("bytes", style.COLORS[1]), ("cached", style.COLORS[2])):
    right.axhline(table("gbps", held=held, block=64), color=shade, linestyle="--", linewidth=1,
                  label=f"{LABELS[held]}, of 64 tokens")
right.set_xscale("log", base=2)
right.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
right.set_ylim(bottom=0)
right.set_xlabel("MiB of all blocks")
right.set_ylabel("KV read, GB/s")
right.legend(fontsize=7)
style.save(figure, "block_size", table, "vAttention (ASPLOS'25) Fig. 3, A100, up to 1.9 at 64 and 128")
