"""Bandwidth above which fetching a prefix's KV beats computing it again (Mooncake, FAST'25, equation 2)."""
import style

MACHINES = ("8xA800", "8xH800", "8xA800 at 44 %")
# FAST'25 section 2.2: prefix of 8,192 tokens.
PUBLISHED = [(8192, 6), (8192, 19)]

table = style.result("break_even")
figure, (left, right) = style.plt.subplots(1, 2, figsize=(8.6, 3.5))
for number, machine in enumerate(MACHINES):
    style.line(left, table.curve("prefix", "paper_gbps", machine=machine), number, machine + ", paper's constants",
               markevery=2)
    style.line(left, table.curve("prefix", "gbps", machine=machine), number, None, alpha=.35)
style.paper(left, *zip(*PUBLISHED), "6 and 19 GB/s", style.known("break_even", "8 x A800, 8,192 tokens, their constants"))
style.plain_log(left)
left.set_ylabel("break-even bandwidth, GB/s")
left.legend(fontsize=7, title="pale: real widths, causal attention", title_fontsize=7)
style.line(right, table.curve("prefix", "recompute_s", machine="8xA800 at 44 %"), 0, "compute, 8xA800 at 44 %")
style.line(right, table.curve("prefix", "fetch_at_100gbit_s", machine="8xA800"), 1, "fetch, 100 Gbit/s")
right.set_yscale("log")
right.set_ylabel("seconds")
right.legend(fontsize=7)
for panel in (left, right):
    panel.set_xscale("log", base=2)
    panel.set_xticks([2**n for n in range(8, 21, 3)], ["256", "2K", "16K", "128K", "1M"])
    panel.set_xlabel("prefix, tokens (Llama-3-70B)")
style.save(figure, "break_even", table, "Mooncake (FAST'25) section 2.2; arithmetic, nothing measured")
