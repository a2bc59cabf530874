"""WavePP's ratios to tensor parallelism from the bubble alone, and what waves in flight gain by themselves."""
import style

table, rings = style.result("cpp_bubble"), style.result("cpp_lockstep")
figure, (left, right) = style.plt.subplots(1, 2, figsize=(8.6, 3.5))
cases = [("65.5K", 0.), ("131K", 0.), ("131K", .9), ("262K", .9)]
for number, cut in enumerate(table.distinct("cut")):
    left.bar([x + .4 * number - .2 for x in range(len(cases))], [table("ratio", length=l, reused=r, cut=cut) for l, r in cases], .38,
             label=cut, **style.FILLS[number])
published = [table("published", length=l, reused=r, cut="equal parts") for l, r in cases]
style.paper(left, range(len(cases)), published, "PP8 / TP, one at a time", style.known("cpp_bubble", "cold 65.5K"))
left.legend(fontsize=7)
left.axhline(1, color="black", linewidth=.8)
left.set_xticks(range(len(cases)), [f"{l}\n{'cold' if r == 0 else '90 % reused'}" for l, r in cases], fontsize=8)
left.set_ylabel("throughput, PP8 / TP, one at a time")
order = [1, 2, 3, 4, 6, 8, 9, 10, 12, 16]
for number, growth in enumerate(sorted(map(float, rings.distinct("growth")))):
    curve = [(x, *3 * (rings("efficiency", growth=growth, window=w),)) for x, w in enumerate(order)]
    style.line(right, curve, number, f"last chunk {growth:g} times the first")
    right.axhline(rings("slots_efficiency", growth=growth, window=0), color=style.COLORS[number], linestyle=":", linewidth=1)
right.set_xticks(range(len(order)), map(str, order))
right.set_xlabel("chunks in flight, P = 8 (dotted: slots as long as the longest)")
right.set_ylabel("efficiency of 16 prompts")
right.legend(fontsize=7)
style.save(figure, "cpp_waves", table, "WavePP (2026-09) Table 4")
