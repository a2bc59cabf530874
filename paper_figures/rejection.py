"""Admission that refuses early, late, or by reservation: requests that meet both objectives, and prefill that is wasted."""
import style

from claims import rejected

table = style.result("rejection")
ways = [("late", 1.0), ("early", 1.0), *(("predicted", f) for f in (.25, .5, 1.0, 2.0, 4.0, 8.0)), ("early_in_flight", 1.0), ("reserve", 1.0)]
words = [way if way != "predicted" else f"t_d x {factor:g}" for way, factor in ways]
figure, panel = style.plt.subplots(figsize=(5, 4))
for number, (column, label) in enumerate((("kept_share", "within both objectives"), ("wasted_share", "prefill wasted"))):
    for at, (way, factor) in enumerate(ways):
        style.bar(panel, at + .4 * number, table, lambda t: rejected(t, column, way, factor), width=.38,
                  label=None if at else label, **style.FILLS[number])
panel.set_xticks([at + .2 for at in range(len(ways))], words, rotation=60, ha="right", fontsize=7)
panel.set_ylabel("share")
panel.legend(fontsize=7)
panel.set_title("12P1D", fontsize=9)
style.save(figure, "rejection", table, bottom=.14)
