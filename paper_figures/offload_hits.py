"""Requests a second by the share of hits (experiment 4 of the KV offloading notes), documents in rounds (their experiment 5), and
a host tier that overflows (vLLM #10874)."""
import style

# vLLM #10874, A100: seconds for 8, 16, 32 and 64 documents, with a CPU tier that holds 30.
NONE = [13.66, 27.28, 54.54, 109.27]
PUBLISHED = {"device": [.49, 7.22, 49.96, 126.08], "both": [.5, 2.3, 17.26, 110.96]}
ROUNDS = {"none": .91, "device": 49.96, "both": 49.22, "host": 9.23}  # experiment 5, outputs of 2 tokens
NAMES = {"none": "no cache", "device": "prefix cache", "both": "both", "host": "host tier"}
DOCUMENTS = [2, 4, 8, 16]

hits = style.result("offload_hits")
rounds = style.result("offload_hits-rounds")
figure, (left, middle, right) = style.plt.subplots(1, 3, figsize=(11, 3.5))

base = hits("requests_per_s", cache="none", hits=0.0)
for number, (cache, link, label) in enumerate((("device", 0, "the pool's cache"), ("host", 5, "host, a link of 1/5 of the prefill"),
                                               ("host", 0, "host, memory's speed"))):
    style.line(left, hits.curve("hits", "requests_per_s", cache=cache, link_times=link), number, label)
left.plot(0, base, color="black", marker="s", linestyle="none", label="no cache")
style.paper(left, [0, 1], [base, base * 98.84 / 20.62], "GPU cache, all / none 4.8", style.known("offload_hits", "device, all hits"))
left.set_ylim(bottom=0)
left.set_xlabel("share of the prompts that is known")
left.set_ylabel("requests/s")
left.legend(fontsize=6.5)

bars = [(scene, cache) for scene in ("fits", "over") for cache in rounds.distinct("cache", scene=scene)]
for at, (scene, cache) in enumerate(bars):
    for number in (1, 3):
        style.bar(middle, at + (number - 2) * .2, rounds,
                  lambda t: t("requests_per_s", scene=scene, cache=cache, round=number) /
                  t("requests_per_s", scene="fits", cache="none", round=3),
                  width=.36, label=f"round {number}" if at == 0 else None, **style.FILLS[0 if number == 3 else 3])
    if scene == "fits":
        style.paper(middle, at + .2, ROUNDS[cache] / ROUNDS["none"], "55, 54 and 10 x", style.known("offload_hits/rounds", "round 3, prefix cache / none"))
style.plain_log(middle)
middle.set_xticks(range(len(bars)), [NAMES[cache] for _, cache in bars], fontsize=6.5, rotation=30, ha="right")
middle.axvline(3.5, color="0.5", linewidth=.8)
middle.set_title("the pool holds all documents | half of them", fontsize=8)
middle.set_ylabel("requests/s / without a cache")
middle.legend(fontsize=6.5)

for number, (cache, eviction, label) in enumerate((("device", "lru", "prefix cache"), ("both", "lru", "and a host tier, lru"),
                                                   ("both", "length_aware", "length_aware"))):
    curve = []
    for documents, *seconds in rounds.curve("documents", "seconds", scene="overrun", cache=cache, eviction=eviction, round=2):
        without = rounds("seconds", scene="overrun", cache="none", documents=int(documents), round=2)
        curve.append((documents, *(s / without for s in seconds)))
    style.line(right, curve, number, label)
for cache, seconds in PUBLISHED.items():
    style.paper(right, DOCUMENTS, [s / n for s, n in zip(seconds, NONE)], "0.04 to 1.15 x", style.known("offload_hits/rounds", "seconds of 4 documents"))
right.axvline(7.5, color="0.4", linestyle=":")
right.annotate("the tier's", (7.7, .02), fontsize=6.5)
style.powers(right, DOCUMENTS)
right.set_ylim(bottom=0)
right.set_xlabel("documents, asked in turn")
right.set_ylabel("seconds / without a cache")
right.legend(fontsize=6.5)
style.save(figure, "offload_hits", hits, "KV offloading (wde), experiments 4 and 5; vLLM #10874, four times as many documents")
