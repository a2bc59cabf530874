"""Turns results into verdicts about claims. The interval of the samples is compared with a paper's figure and with our arithmetic.

An interval lies inside a range, outside it, or across its edge. If it lies across the edge, the claim is undecided, however
close the median is to the middle of the range.
"""
import random
import statistics
from dataclasses import dataclass

RESAMPLES = 1000
# With fewer samples no bootstrap gives a 95 % interval (the extremes of 5 samples cover 94 %), so the whole range is taken.
FEWEST = 6

VERDICTS = ["agrees with the paper", "differs from the paper", "agrees with arithmetic", "differs from arithmetic",
            "undecided", "not run"]


def interval(numbers):
    """95 % bootstrap interval of the median, by percentiles. Every call with the same numbers returns the same interval."""
    if len(numbers) < FEWEST or min(numbers) == max(numbers):
        return min(numbers), max(numbers)
    dice = random.Random(1)
    medians = sorted(statistics.median(dice.choices(numbers, k=len(numbers))) for _ in range(RESAMPLES))
    return medians[int(.025 * RESAMPLES)], medians[int(.975 * RESAMPLES) - 1]


def against(low, high, least, most):
    """Compares the interval [low, high] with the range [least, most]."""
    slack = 1e-9 * max(abs(least), abs(most))  # rounding of binary fractions
    if least - slack <= low and high <= most + slack:
        return "agrees"
    return "differs" if high < least - slack or low > most + slack else "undecided"


@dataclass
class Estimate:
    """A number with an interval of its own. It is for counts, where a repeated measurement gives the same count."""
    middle: float
    low: float
    high: float
    n: int


def _root(rises, low, high):
    """The argument at which an increasing function becomes positive."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rises(middle) > 0 else (middle, high)
    return (low + high) / 2


def share(right, n):
    """The share right / n, with Wilson's 95 % interval."""
    z, p = 1.959964, right / n
    centre, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** .5
    return Estimate(p, (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n), n)


def lost(lost_, won, n):
    """Returns (lost - won) / n for n questions that two configurations answer. `lost_` counts the questions that only the first
    one answers correctly, `won` those that only the second one does. The interval is Tango's 95 % score interval for paired
    proportions (1998), which inverts McNemar's test. With no question lost and none won it is still not (0, 0)."""
    def score(d):
        b = (2 * n - lost_ + won) * d - lost_ - won
        q = ((b * b + 8 * n * won * d * (1 - d)) ** .5 - b) / (4 * n)  # the most likely share of `won` if the difference is d
        return (n * d - lost_ + won) / max(n * (2 * q + d * (1 - d)), 1e-300) ** .5
    difference = (lost_ - won) / n
    return Estimate(difference, _root(lambda d: score(d) + 1.959964, -1, difference),
                    _root(lambda d: score(d) - 1.959964, difference, 1), n)


READ = {"paper": "", "summary": ", from a summary", "memory": ", from memory"}


@dataclass
class Printed:
    """A published figure: its text, and the range in which our figure counts as the same (without one nothing is compared)."""
    text: str
    low: float = None
    high: float = None
    read: str = "paper"  # source of the figure: the paper (or its code and documents), a summary of the paper, or memory

    def known(self):
        return READ[self.read]

    def comparable(self):
        return self.low is not None


def printed(text, low=None, high=None, read="paper"):
    """A range is compared as it was published. A single figure gets 5 % on each side. If it is a ratio, the margin is also at
    most a quarter of the effect that the ratio claims, so that 1 does not reproduce 1.05."""
    if low is not None and high is None:
        near = min(.05 * abs(low), abs(low - 1) / 4) if low != 1 else .05
        low, high = low - near, low + near
    return Printed(text, low, high, read)


@dataclass
class Evidence:
    verdict: str
    middle: float = None
    low: float = None
    high: float = None
    n: int = 0
    paper: str = ""  # "agrees", "differs" or "undecided"; "": no figure to compare
    arithmetic: str = ""
    trouble: str = ""  # why it was not run

    def words(self):
        """The verdict. The comparison with our arithmetic is added if it says something else than that with the paper."""
        if self.paper and self.arithmetic and self.paper != self.arithmetic:
            return f"{self.verdict}; {self.arithmetic} with arithmetic".replace("differs with", "differs from").replace(
                "undecided with", "undecided against")
        return self.verdict


def decide(numbers, least, most, paper):
    """`numbers` has one number a sample, or holds one Estimate. `least` and `most` come from our arithmetic. `paper` is a
    Printed or None."""
    if isinstance(numbers[0], Estimate):
        one, = numbers
        low, high = one.low, one.high
        found = Evidence("", one.middle, low, high, one.n)
    else:
        low, high = interval(numbers)
        found = Evidence("", statistics.median(numbers), low, high, len(numbers))
    found.arithmetic = against(low, high, least, most)
    if paper and paper.comparable():
        found.paper = against(low, high, paper.low, paper.high)
    against_what, name = (found.paper, "the paper") if found.paper else (found.arithmetic, "arithmetic")
    found.verdict = {"agrees": f"agrees with {name}", "differs": f"differs from {name}"}.get(against_what, "undecided")
    return found
