"""Requests a second while all KV is copied to the host (experiment 3 of the KV offloading notes)."""
import style

# Experiment 3, 3B: requests a second without and with swapping out, by the tokens of a step.
PUBLISHED = [(32, .29 / .30), (1024, 2.45 / 2.48)]

table = style.result("offload_overhead")
figure, left = style.plt.subplots(figsize=(4.2, 3.3))
style.line(left, table.curve("chunk", "ratio", link_times=0), 0, "memory's speed")
style.line(left, table.curve("chunk", "ratio", link_times=5), 1, "a link of 1/5 of the prefill")
left.axhline(1 / 1.2, color="0.4", linestyle=":")
left.annotate("if that link were waited for", (34, .84), fontsize=6.5)
style.paper(left, *zip(*PUBLISHED), "0.97 and 0.99 x", style.known("offload_overhead", "requests/s with / without, chunks of 32"))
style.powers(left, [32, 128, 512, 1024])
left.set_ylim(.7, 1.1)
left.set_xlabel("tokens of a step")
left.set_ylabel("requests/s with the tier / without")
left.legend(fontsize=6.5, loc="lower right")
style.save(figure, "offload_overhead", table, "KV offloading (wde), experiment 3, 3B; a copy that takes a fifth and is not hidden")
