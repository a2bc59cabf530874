"""Refused early, late, or by reservation: what keeps both objectives, what prefill is wasted, how the loads swing."""
import style

from claims import rejected

table = style.result("rejection")
ways = [("late", 1.0), ("early", 1.0), *(("predicted", f) for f in (.25, .5, 1.0, 2.0, 4.0, 8.0)), ("early_in_flight", 1.0), ("reserve", 1.0)]
words = [way if way != "predicted" else f"t_d x {factor:g}" for way, factor in ways]
figure, panels = style.plt.subplots(1, 3, figsize=(12, 4))
for number, (column, label) in enumerate((("kept_share", "within both objectives"), ("wasted_share", "prefill wasted"))):
    for at, (way, factor) in enumerate(ways):
        style.bar(panels[0], at + .4 * number, table, lambda t: rejected(t, column, way, factor), width=.38,
                  label=None if at else label, **style.FILLS[number])
panels[0].set_xticks([at + .2 for at in range(len(ways))], words, rotation=60, ha="right", fontsize=7)
panels[0].set_ylabel("share")
panels[0].legend(fontsize=7)
panels[0].set_title("12P1D", fontsize=9)
for panel, shapes, title in ((panels[1], ("12P1D", "24P2D", "48P4D"), "more of everything"), (panels[2], ("16P1D", "12P1D", "9P1D"), "longer prefill")):
    for number, way in enumerate(("early", "reserve")):
        for side, (column, label) in enumerate((("p_swing", "P"), ("d_swing", "D"))):
            for at, shape in enumerate(shapes):
                style.bar(panel, at + .4 * number + .18 * side, table, lambda t: rejected(
                    t, column, way, topology=shape, part="overload" if shape == "12P1D" else "swing"), width=.17,
                    label=None if at else f"{way}, {label}", **style.FILLS[2 * number + side])
    panel.set_xticks([at + .25 for at in range(len(shapes))], shapes)
    panel.set_ylabel("swing of the load (standard deviation)")
    panel.set_title(title, fontsize=9)
panels[1].legend(fontsize=7)
style.save(figure, "rejection", table, bottom=.14)
