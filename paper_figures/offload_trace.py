"""Steps of the engine and copies of its KV on one clock (KV offloading's experiment 2): a prompt of 2 x 1,024 tokens
computed and copied out, then three equal ones swapped in. The first round of the first repetition."""
import style

table = style.result("offload_trace").samples()[0]
first = table.distinct("round")[0]
figure, axes = style.plt.subplots(2, 1, figsize=(8.4, 2.8), sharex=True)
for part, number in (("computed", 0), ("swapped in", 1)):
    lanes = (("step", style.COLORS[5]), ("out", style.COLORS[1])) if part == "computed" else (("step", style.COLORS[5]), ("in", style.COLORS[1]))
    for height, (what, color) in enumerate(lanes):
        bars = [(float(row["begin_ms"]), float(row["end_ms"]) - float(row["begin_ms"]))
                for row in table.select(round=first, part=part, what=what)]
        axes[number].broken_barh(bars, (-height - .35, .7), facecolor=color, edgecolor="white", linewidth=.5)
    axes[number].set_yticks([0, -1], ["steps", "copies " + lanes[1][0]])
    axes[number].set_title({"computed": "one prompt, computed", "swapped in": "three equal ones, swapped in"}[part],
                           fontsize=8, loc="left")
# Published (3B): 16 ms out beside steps of 50, all of it hidden behind the next step.
step, out = (table.select(round=first, part="computed", what=what)[0] for what in ("step", "out"))
length = float(step["end_ms"]) - float(step["begin_ms"])
style.paper(axes[0], float(out["begin_ms"]) + .32 * length, -1, "the copy's end, after 0.32 of the step that computed it", style.known("offload_trace", "1,024 tokens on their way out"))
axes[0].legend(fontsize=6.5, loc="lower right", bbox_to_anchor=(1, 1))
axes[1].set_xlabel("ms; the link takes 0.32 of a step for its tokens, as in KV offloading (wde), experiment 2")
style.save(figure, "offload_trace", table, "KV offloading (wde), experiment 2: a copy out takes 0.32 of its step, beside the next, which it hardly disturbs")
