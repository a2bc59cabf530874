"""Copies between the pool and the host tier: GB/s by block size (the granularity of the KV offloading notes), and the time to
compute KV beside the time to move it (experiment 1 of the notes)."""
import style

# Seconds of prefill / seconds of swapping in, 8,192 tokens: 3B, 7B, glm-9b, llama-8B, 32B-int4 (experiment 1 of the notes).
PUBLISHED = [.40 / .08, .84 / .06, 1.08 / .09, .89 / .09, 3.69 / .19]

table = style.result("offload_cost-copy")
cost = style.result("offload_cost")
figure, (left, right) = style.plt.subplots(1, 2, figsize=(8.8, 3.6))
for number, (column, order, blocks, label) in enumerate((
        ("in_gbps", "token_major", "scattered", "in, token_major, scattered"),
        ("out_gbps", "token_major", "scattered", "out, token_major, scattered"),
        ("in_gbps", "layer_major", "scattered", "in, layer_major: 512 B pieces"))):
    style.line(left, table.curve("block_bytes", column, order=order, blocks=blocks), number, label)
for size, rate in ((8 << 10, 3.8), (16 << 10, 7.8), (32 << 10, 11.9)):  # one copy each: 3B, 7B, 8B
    style.paper(left, size, rate, "3.8, 7.8, 11.9 GB/s", style.known("offload_cost/copy", "in, scattered blocks of 4 KiB"))
sizes = [4096 << shift for shift in range(0, 10, 2)] + [2 << 20]
style.powers(left, sizes, ["4 KiB", "16", "64", "256", "1 MiB", "2"])
style.plain_log(left)
left.set_xlabel("block")
left.set_ylabel("GB/s")
left.legend(fontsize=6.5)
for number, (column, label) in enumerate((("prefill_ms", "prefill"), ("reuse_ms", "first token, KV swapped in"),
                                          ("out_ms", "out"), ("in_ms", "in"))):
    style.line(right, cost.curve("tokens", column, link_times=0), number, label)
base = cost("prefill_ms", tokens=1024, link_times=0)
style.paper(right, [1024] * len(PUBLISHED), [base / ratio for ratio in PUBLISHED], "in, 1/5 to 1/19 of prefill", style.known("offload_cost", "prefill / swap in"))
right.plot(1024, cost("in_ms", tokens=1024, link_times=5), color="0.0", marker="P", linestyle="none",
           label="in, a link of 1/5 of the prefill")
style.powers(right, [256, 512, 1024, 2048])
style.plain_log(right)
right.set_xlabel("tokens")
right.set_ylabel("ms")
right.legend(fontsize=6.5)
style.save(figure, "offload_cost", table, "KV offloading (wde): GB/s of its copies; prefill / its ratio of prefill to swap-in")
