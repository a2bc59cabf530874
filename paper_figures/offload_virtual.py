"""A host tier, simulated with the costs of the machine of the KV offloading notes (their experiments 3 to 5)."""
import style

NAMES = {"none": "no cache", "device": "prefix cache", "both": "both", "host": "host tier"}
ROUNDS = {"none": .91, "device": 49.96, "both": 49.22, "host": 9.23}

table = style.result("offload_virtual")
figure, (left, right, steps) = style.plt.subplots(1, 3, figsize=(12.6, 3.7))
for number, (cache, label) in enumerate((("device", "prefix cache in the pool"), ("host", "host tier"))):
    style.line(left, table.curve("hits", "requests_per_s", scene="hits", cache=cache), number, label)
style.paper(left, [0, 1], [20.62, 98.84], "prefix cache 20.6 and 98.8 /s")
left.set_ylim(bottom=0)
left.set_xlabel("share of the prompts that is known")
left.set_ylabel("requests/s (3B, prompts of 1,000)")
left.legend(fontsize=7)
for at, cache in enumerate(ROUNDS):
    rate = table("requests_per_s", scene="rounds", cache=cache, output=2, round=3)
    right.bar(at, rate, width=.6, **style.FILLS[0])
    right.annotate(f"{rate:.3g}", (at, rate * 1.1), ha="center", fontsize=7)
style.paper(right, range(len(ROUNDS)), list(ROUNDS.values()), "0.91, 49.96, 49.22, 9.23 /s")
right.set_yscale("log")
right.set_ylim(.3, 200)
right.set_yticks([.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"])
right.minorticks_off()
right.set_xticks(range(len(ROUNDS)), [NAMES[cache] for cache in ROUNDS])
right.set_ylabel("requests/s, round 3 (7B, 10 x 10,240 tokens)")
for number, (plan, tier) in enumerate((plan, tier) for plan in ("sync", "async-2") for tier in ("none", "host")):
    style.line(steps, table.curve("chunk", "requests_per_s", scene="chunks", plan=plan, cache=tier), number,
               plan + (", tier" if tier == "host" else ""))
style.paper(steps, [32, 1024], [.30, 2.48], "sync 0.30 and 2.48 /s")
style.paper(steps, [32, 1024], [.39, 2.58], "async-2 0.39 and 2.58 /s")
style.powers(steps, [32, 64, 128, 256, 512, 1024])
steps.set_xlabel("tokens of a step")
steps.set_ylabel("requests/s (3B, 4 x 8,192 tokens)")
steps.legend(fontsize=7)
style.save(figure, "offload_virtual", table, "KV offloading (wde), experiments 3 to 5",
           scene="one card of 179 to 200 TFLOP/s, Qwen2.5-3B and -7B")
