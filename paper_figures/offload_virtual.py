"""A host tier with the costs of the machine on which it was published (KV offloading, experiments 4 and 5)."""
import style

NAMES = {"none": "no cache", "device": "prefix cache", "both": "both", "host": "host tier"}
ROUNDS = {"none": .91, "device": 49.96, "both": 49.22, "host": 9.23}

table = style.result("offload_virtual")
figure, (left, right) = style.plt.subplots(1, 2, figsize=(8.8, 3.7))
for number, (cache, label) in enumerate((("device", "prefix cache in the pool"), ("host", "host tier"))):
    style.line(left, table.curve("hits", "requests_per_s", scene="hits", cache=cache), number, label)
style.paper(left, [0, 1], [20.62, 98.84], "prefix cache 20.6 and 98.8 /s", style.known("offload_virtual", "all hits / none"))
left.set_ylim(bottom=0)
left.set_xlabel("share of the prompts that is known")
left.set_ylabel("requests/s (3B, prompts of 1,000)")
left.legend(fontsize=7)
for at, cache in enumerate(ROUNDS):
    rate = table("requests_per_s", scene="rounds", cache=cache, round=3)
    right.bar(at, rate, width=.6, **style.FILLS[0])
    right.annotate(f"{rate:.3g}", (at, rate * 1.1), ha="center", fontsize=7)
style.paper(right, range(len(ROUNDS)), list(ROUNDS.values()), "0.91, 49.96, 49.22, 9.23 /s", style.known("offload_virtual", "documents, round 3"))
right.set_yscale("log")
right.set_ylim(.3, 200)
right.set_yticks([.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"])
right.minorticks_off()
right.set_xticks(range(len(ROUNDS)), [NAMES[cache] for cache in ROUNDS])
right.set_ylabel("requests/s, round 3 (7B, 10 x 10,240 tokens)")
style.save(figure, "offload_virtual", table, "KV offloading (wde), experiments 4 and 5, RTX 4090")
