"""Every placement rule on four loads and two pools: its mean TTFT relative to that of the best rule."""
import style


def times_best(table, row, pool, load):
    """The mean TTFT of a row, divided by that of the best row."""
    def mean_of(name):
        return table("ttft_mean_s", load=load, pool=pool, placement=name)
    return mean_of(row) / min(map(mean_of, table.distinct("placement")))


table = style.result("routers")
pools, loads = table.distinct("pool"), table.distinct("load")
rows = sorted(table.distinct("placement"), key=lambda row: sum(
    min(10, times_best(table, row, pool, load)) for pool in pools for load in loads))
figure, panels = style.plt.subplots(1, len(pools), figsize=(12, 5), sharey=True)
for panel, pool in zip(panels, pools):
    for number, load in enumerate(loads):
        for at, row in enumerate(rows):
            ratios = [times_best(part, row, pool, load) for part in table.samples()]
            middle, (low, high) = style.statistics.median(ratios), style.interval(ratios)
            panel.errorbar(middle, at + .12 * (number - 2), xerr=[[middle - low], [high - middle]], capsize=2,
                           label=None if at else load.replace("tool_agent", "tool&agent"), **style.LINES[number])
    panel.set_xscale("log")
    panel.set_xlabel("mean TTFT / best row's")
    panel.set_title(pool, fontsize=9)
panels[0].set_yticks(range(len(rows)), rows)
panels[0].invert_yaxis()
panels[-1].legend(fontsize=7)
style.save(figure, "routers", table, scene="8 nodes of 8 A800, Llama-3-70B")
