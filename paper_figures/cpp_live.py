"""Two live stages beside one core, a team and two tensor ranks; and what each chunk policy makes of a virtual pipeline."""
import statistics

import style

live, virtual = style.result("cpp_live"), style.result("cpp_policies")
figure, (left, right) = style.plt.subplots(1, 2, figsize=(11, 3.5))
hows = ["one core", "team of two", "tp 2", "W 1", "W 2", "W 4", "W 64"]
for number, (load, label) in enumerate((("one", "a prompt of 1,024"), ("queue", "8 prompts of 256"))):
    speeds = [[alone / s for alone, s in zip(live.values("seconds", load=load, how="one core"),
                                             live.values("seconds", load=load, how=how))] for how in hows]
    middle = [statistics.median(s) for s in speeds]
    ends = [style.interval(s) for s in speeds]
    left.bar([x + .4 * number - .2 for x in range(len(hows))], middle, .38, label=label, capsize=2,
             yerr=[[m - e[0] for m, e in zip(middle, ends)], [e[1] - m for m, e in zip(middle, ends)]], **style.FILLS[number])
left.set_xticks(range(len(hows)), hows, fontsize=7)
left.set_ylabel("times one core")
left.legend(fontsize=7)
policies = virtual.distinct("policy")
loads = virtual.distinct("load")
for number, load in enumerate(loads):
    best = [virtual("tokens_per_s", load=load, policy=p, window=16) / virtual("tokens_per_s", load=load, policy="fixed", window=16)
            for p in policies]
    right.bar([x + .8 * number / len(loads) - .4 for x in range(len(policies))], best, .8 / len(loads), label=load,
              align="edge", **style.FILLS[number])
right.set_xticks(range(len(policies)), policies, fontsize=7, rotation=20)
right.set_ylabel("tokens/s, times fixed (P = 8, W = 16, virtual)")
right.axhline(1, color="black", linewidth=.8)
right.legend(fontsize=7)
style.save(figure, "cpp_live", live)
