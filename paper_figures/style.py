"""What the figures share: where results come from, marks that can be told apart in grey, and a line that says on what
machine and from which commit. A figure measures nothing."""
import os
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, os.path.join(ROOT, "experiments"))

from table import Table, TableError  # noqa: E402, F401

plt.rcParams.update({
    "font.size": 9, "axes.grid": True, "grid.color": "0.88", "axes.axisbelow": True, "lines.markersize": 5,
    "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 110,
    "pdf.fonttype": 42, "svg.hashsalt": "xpyd",
})

# One per contestant, in order: grey level, dash, marker.
LINES = [
    {"color": "0.0", "linestyle": "-", "marker": "o"},
    {"color": "0.35", "linestyle": "--", "marker": "s"},
    {"color": "0.55", "linestyle": "-.", "marker": "^"},
    {"color": "0.2", "linestyle": ":", "marker": "D"},
    {"color": "0.65", "linestyle": "-", "marker": "v"},
    {"color": "0.45", "linestyle": "--", "marker": "x"},
]
FILLS = [
    {"facecolor": "0.25", "edgecolor": "black"},
    {"facecolor": "0.95", "edgecolor": "black", "hatch": "..."},
    {"facecolor": "0.75", "edgecolor": "black", "hatch": "///"},
    {"facecolor": "white", "edgecolor": "black"},
]
PAPER = {"color": "black", "marker": "*", "markersize": 11, "linestyle": "none", "markerfacecolor": "white"}


def path(name):
    return os.path.join(os.environ.get("RESULTS", os.path.join(ROOT, "experiments", "results")), name + ".csv")


def result(name):
    """The result file; a figure without one is not drawn, and says so."""
    try:
        return Table.load(path(name))
    except TableError as error:
        print(f"not drawn: {error}")
        sys.exit(0)


def line(axes, curve, number, label, **more):
    """A curve of Table.curve(): medians, with the least and greatest as bars where there are repetitions."""
    x, middle, low, high = zip(*curve)
    spread = [[m - l for m, l in zip(middle, low)], [h - m for m, h in zip(middle, high)]]
    if all(v == 0 for side in spread for v in side):
        spread = None
    axes.errorbar(x, middle, yerr=spread, label=label, capsize=2, linewidth=1.2, **LINES[number], **more)


def quantiles(axes, table, number, label, **where):
    """The distribution of gaps between tokens, from the percentiles of a run: medians over the repetitions."""
    known = [(5, "itl_ms_p5"), (25, "itl_ms_p25"), (50, "median_itl_ms"), (75, "itl_ms_p75"), (90, "itl_ms_p90"),
             (95, "itl_ms_p95"), (99, "p99_itl_ms"), (99.9, "itl_ms_p99.9")]
    axes.plot([table(column, **where) for _, column in known], [p for p, _ in known], label=label, linewidth=1.2,
              **LINES[number])
    axes.set_xscale("log")
    axes.set_xlabel("gap between tokens, ms")
    axes.set_ylabel("% of gaps at most")


def powers(axes, values, words=None):
    """A logarithmic axis of base 2 with a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, words or [f"{v:g}" for v in values])
    axes.minorticks_off()


def save(figure, name, table, paper=""):
    """paper: where the published points come from."""
    device = "CPU" if table.stamp["device"] == "cpu" else table.stamp["device"]
    text = f"{device}: {table.stamp['machine']}; commit {table.stamp['commit']}, {table.stamp['begun'][:10]}"
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.text(0.01, 0.012, text + (f"\nstars and dotted lines: {paper}" if paper else ""), fontsize=6.5, color="0.3")
    out = os.path.join(HERE, "out")
    os.makedirs(out, exist_ok=True)
    for suffix, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):
        figure.savefig(os.path.join(out, f"{name}.{suffix}"), metadata=metadata)
    print(f"paper_figures/out/{name}.png, .pdf")
