"""Code that the figures share: loading of results, colours that colour-blind readers can distinguish, markers and
dashes that survive grey print, bars of the spread, the papers' figures, and a footer with machine and commit. No figure
measures anything."""
import os
import statistics
import sys

import matplotlib
import matplotlib.ticker

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, os.path.join(ROOT, "experiments"))

from evidence import interval  # noqa: E402
from table import Table, TableError  # noqa: E402, F401

plt.rcParams.update({
    "font.size": 9, "axes.grid": True, "grid.color": "0.88", "axes.axisbelow": True, "lines.markersize": 5,
    "legend.frameon": True, "legend.framealpha": .9, "legend.edgecolor": "0.85", "legend.fancybox": False,
    "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 110,
})

# The colours of Okabe and Ito, one per configuration in order. Each has a dash and a marker of its own.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
LINES = [{"color": color, "linestyle": dash, "marker": marker}
         for color, dash, marker in zip(COLORS, ["-", "--", "-.", ":", "-", "--", "-."], "os^DvxP")]
FILLS = [{"facecolor": color, "edgecolor": "black", "linewidth": .6, **({"hatch": hatch} if hatch else {})}
         for color, hatch in zip(["#0072B2", "#E69F00", "#56B4E9", "white", "#009E73"], ["", "...", "///", "", "xx"])]
PAPER = {"color": "black", "marker": "*", "markersize": 11, "linestyle": "none", "markerfacecolor": "#F0E442",
         "zorder": 5}


def paper(axes, x, y, text):
    """Plots published points. The legend gives their values."""
    label = f"paper: {text}"
    axes.plot(x, y, label=None if label in axes.get_legend_handles_labels()[1] else label, **PAPER)


def path(name):
    return os.path.join(os.environ.get("RESULTS", os.path.join(ROOT, "experiments", "results")), name + ".csv")


def not_drawn(kind, error, trace):
    """Reports a result that lacks what the figure shows like a missing result: the figure is not drawn."""
    if not issubclass(kind, TableError):
        return sys.__excepthook__(kind, error, trace)
    print(f"not drawn: {error}", flush=True)
    os._exit(0)


sys.excepthook = not_drawn


def result(name):
    """Loads the result file. Without one the script says that the figure is not drawn, and ends."""
    try:
        return Table.load(path(name))
    except TableError as error:
        print(f"not drawn: {error}")
        sys.exit(0)


def line(axes, curve, number, label, **more):
    """Draws a curve of Table.curve(): medians, with their intervals as bars if there are several samples."""
    x, middle, low, high = zip(*curve)
    spread = [[m - l for m, l in zip(middle, low)], [h - m for m, h in zip(middle, high)]]
    if all(v == 0 for side in spread for v in side):
        spread = None
    axes.errorbar(x, middle, yerr=spread, label=label, capsize=2, linewidth=1.2, **LINES[number], **more)


def bar(axes, at, table, value, **look):
    """Draws the median of value(Table of one sample) over all samples as a bar, with its interval."""
    numbers = [value(part) for part in table.samples()]
    middle, (low, high) = statistics.median(numbers), interval(numbers)
    axes.bar(at, middle, yerr=[[middle - low], [high - middle]] if low < high else None, capsize=2,
             error_kw={"linewidth": 1}, **look)


def quantiles(axes, table, number, label, **where):
    """Draws the distribution of gaps between tokens from the percentiles of a run: medians over the repetitions, with
    their intervals."""
    known = [(5, "itl_ms_p5"), (25, "itl_ms_p25"), (50, "median_itl_ms"), (75, "itl_ms_p75"), (90, "itl_ms_p90"),
             (95, "itl_ms_p95"), (99, "p99_itl_ms")]
    known = [(p, c) for p, c in known if all(row[c] for row in table.select(**where))]  # "": too few gaps
    at = [p for p, _ in known]
    line, = axes.plot([table(column, **where) for _, column in known], at, label=label, linewidth=1.2, **LINES[number])
    low, high = zip(*(interval(table.values(column, **where)) for _, column in known))
    axes.fill_betweenx(at, low, high, color=line.get_color(), alpha=.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_xlabel("gap between tokens, ms")
    axes.set_ylabel("% of gaps at most")


def powers(axes, values, words=None):
    """Makes the x axis logarithmic with base 2 and a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, words or [f"{v:g}" for v in values])
    axes.minorticks_off()


def plain_log(axes):
    """Makes the y axis logarithmic with plain numbers: 1, 2, 5, 10, ... in the visible range. Call it after drawing."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    digits = (1, 2, 5) if high < 300 * low else (1,)
    ticks = [digit * 10.0 ** power for power in range(-6, 8) for digit in digits]
    ticks = [t for t in ticks if low <= t <= high]
    axes.set_yticks(ticks, [f"{t:,.0f}" if t >= 1 else f"{t:g}" for t in ticks])
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_ylim(low, high)


def save(figure, name, table, source="", scene="", bottom=.06):
    """Writes the figure. `source` says where published points come from, `scene` what is simulated; `bottom` is the
    space below the panels."""
    device = "CPU" if table.stamp["device"] == "cpu" else table.stamp["device"]
    text = f"simulated: {scene}" if scene else f"{device}: {table.stamp['machine']}"
    text += f"; commit {table.stamp['commit']}, {table.stamp['begun'][:10]}"
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        mine = [(h, w) for h, w in zip(handles, labels) if axes.get_legend() or w.startswith("paper")]
        if mine and (not axes.get_legend() or len(axes.get_legend().get_texts()) != len(mine)):
            axes.legend(*zip(*mine), fontsize=6.5)
        if axes.get_legend() and axes.patches and axes.get_autoscaley_on() and axes.get_yscale() == "linear":
            axes.set_ylim(top=1.25 * axes.get_ylim()[1])  # room for the legend above the bars
    figure.tight_layout(rect=(0, bottom, 1, 1))
    text += f"\nstars and dotted lines: {source}" if source else ""
    figure.text(0.01, 0.012, text, fontsize=6.5, color="0.3")
    out = os.path.join(HERE, "out")
    os.makedirs(out, exist_ok=True)
    figure.savefig(os.path.join(out, f"{name}.png"), metadata={"Software": None})
    print(f"paper_figures/out/{name}.png")
