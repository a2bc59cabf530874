"""Draws loss.csv as loss.png with matplotlib: python plot.py"""

import csv
import os

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = os.path.dirname(os.path.abspath(__file__))


def smooth(values, n=5):
    """Moving mean. A step that predicted no value has the loss "nan" and does not count."""
    windows = [[v for v in values[max(0, i - n + 1) : i + 1] if v == v] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def main():
    with open(os.path.join(HERE, "loss.csv"), encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    column = lambda name: [float(row[name]) for row in rows]
    tokens = [t / 1e6 for t in column("tokens")]
    figure, (loss, right) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    loss.plot(tokens, smooth(column("loss")), "-", color="black", label="all answer tokens")
    loss.plot(tokens, smooth(column("value_loss")), "--", color="0.45", label="values")
    loss.set_yscale("log")
    loss.set_ylabel("loss, nats")
    loss.legend()
    right.plot(tokens, smooth(column("value_right")), "-", color="black", label="stated values")
    right.plot(tokens, smooth(column("not_stated_right")), "--", color="0.45", label="not stated")
    right.set_ylabel("share right")
    right.set_xlabel("million tokens")
    right.legend()
    lengths = column("length")
    for axes in (loss, right):
        for i in range(1, len(rows)):
            if lengths[i] != lengths[i - 1]:
                axes.axvline(tokens[i], color="0.8", linewidth=0.8)
    for i in range(len(rows)):
        if i == 0 or lengths[i] != lengths[i - 1]:
            loss.annotate(f"{lengths[i]:.0f}", (tokens[i], loss.get_ylim()[1]), fontsize=7, color="0.3", xytext=(1, -8),
                          textcoords="offset points")
    loss.set_title("Demo model: training, moving mean of 50 steps; grey lines: longer documents (tokens)", fontsize=9)
    figure.savefig(os.path.join(HERE, "loss.png"), dpi=110)


if __name__ == "__main__":
    main()
