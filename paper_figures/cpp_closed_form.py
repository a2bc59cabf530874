"""A pipeline's closed form against two published runs, and what dynamic chunks save of one prompt."""
import style

table, gain = style.result("cpp_closed_form"), style.result("cpp_dynamic_gain")
figure, (left, right) = style.plt.subplots(1, 2, figsize=(8.6, 3.4))
ranks = [1, 2]
for number, (column, words) in enumerate((("closed_s", "sum + (P - 1) longest"), ("from_one_rank_s", "from one rank's chunks, halved"))):
    left.bar([x + .3 * number - .15 for x in range(2)], [table(column, ranks=r) for r in ranks], .28, label=words, **style.FILLS[number])
style.paper(left, range(2), [table("measured_s", ranks=r) for r in ranks], "30.31 and 15.63 s", style.known("cpp_closed_form", "2 ranks: closed form"))
left.set_xticks(range(2), [f"{r} rank{'s' * (r > 1)}" for r in ranks])
left.set_ylabel("seconds, 56,320 tokens in 11 chunks")
left.legend(fontsize=7)
for number, stages in enumerate((2, 4, 8)):
    style.line(right, gain.curve("q", "gain", stages=stages), number, f"{stages} stages")
style.paper(right, [.55], [1.148], "61.4 / 53.5 s", style.known("cpp_dynamic_gain", "two stages: fixed / dynamic"))
right.set_xlabel("share of attention in 128K tokens")
right.set_ylabel("256K: chunks of 32K / dynamic")
right.set_ylim(1, 2.3)
right.legend(fontsize=7)
style.save(figure, "cpp_closed_form", table, "tt-metal #49903; vllm-ascend #7896, whose stages and share are not said; arithmetic, nothing measured")
