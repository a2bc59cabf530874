"""Speed of two live pipeline stages, beside that of one core, a team of two threads, and two tensor-parallel ranks."""
import statistics

import style

live = style.result("cpp_live")
figure, left = style.plt.subplots(figsize=(5.5, 3.5))
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
style.save(figure, "cpp_live", live)
