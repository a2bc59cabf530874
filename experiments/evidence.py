"""What a result says about a claim: the spread of what was seen, against a paper's figure and against our arithmetic.

An interval is inside a range, outside, or across its edge; across it nothing is decided, however near the middle is.
"""
import random
import statistics
from dataclasses import dataclass

RESAMPLES = 1000
# Of fewer samples no resampling makes a 95 % interval (5 equal halves of a coin: 94 %): the whole range seen.
FEWEST = 6

VERDICTS = ["agrees with the paper", "differs from the paper", "agrees with arithmetic", "differs from arithmetic",
            "undecided", "not run"]


def interval(numbers):
    """95 % bootstrap interval of the median, by percentiles; the same on every call."""
    if len(numbers) < FEWEST or min(numbers) == max(numbers):
        return min(numbers), max(numbers)
    dice = random.Random(1)
    medians = sorted(statistics.median(dice.choices(numbers, k=len(numbers))) for _ in range(RESAMPLES))
    return medians[int(.025 * RESAMPLES)], medians[int(.975 * RESAMPLES) - 1]


def against(low, high, least, most):
    """An interval against the range [least, most]."""
    slack = 1e-9 * max(abs(least), abs(most))  # of binary fractions
    if least - slack <= low and high <= most + slack:
        return "agrees"
    return "differs" if high < least - slack or low > most + slack else "undecided"


@dataclass
class Estimate:
    """A number that brings its own interval: of counts, where to ask once more gives the same."""
    middle: float
    low: float
    high: float
    n: int


def _root(rises, low, high):
    """Where a function that rises becomes positive."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rises(middle) > 0 else (middle, high)
    return (low + high) / 2


def share(right, n):
    """A share of n, with Wilson's interval of 95 %."""
    z, p = 1.959964, right / n
    centre, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** .5
    return Estimate(p, (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n), n)


def lost(lost_, won, n):
    """(lost - won) / n of n questions that two answered, of which one alone had `lost_` right and the other `won`: paired,
    with Tango's score interval of 95 % (1998: McNemar's test, inverted). None lost and none won is no (0, 0)."""
    def score(d):
        b = (2 * n - lost_ + won) * d - lost_ - won
        q = ((b * b + 8 * n * won * d * (1 - d)) ** .5 - b) / (4 * n)  # the likeliest share of `won`, if d is right
        return (n * d - lost_ + won) / max(n * (2 * q + d * (1 - d)), 1e-300) ** .5
    difference = (lost_ - won) / n
    return Estimate(difference, _root(lambda d: score(d) + 1.959964, -1, difference),
                    _root(lambda d: score(d) - 1.959964, difference, 1), n)


READ = {"paper": "", "summary": ", from a summary", "memory": ", from memory"}


@dataclass
class Printed:
    """A published figure: in words, and as the range in which ours counts as the same (none: nothing to compare)."""
    text: str
    low: float = None
    high: float = None
    read: str = "paper"  # where the figure was read: the paper (or its code and documents), a summary of it, from memory

    def known(self):
        return READ[self.read]

    def comparable(self):
        return self.low is not None


def printed(text, low=None, high=None, read="paper"):
    """A range is what was published. A single figure stands for itself and 5 % around it, and where it is a ratio for
    no more than a quarter of the effect that it claims: 1.05 is not reproduced by 1."""
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
    paper: str = ""  # agrees, differs, undecided; "": no figure to compare
    arithmetic: str = ""
    trouble: str = ""  # why it is not run

    def words(self):
        """The verdict, and the other comparison where it says something else."""
        if self.paper and self.arithmetic and self.paper != self.arithmetic:
            return f"{self.verdict}; {self.arithmetic} with arithmetic".replace("differs with", "differs from").replace(
                "undecided with", "undecided against")
        return self.verdict


def decide(numbers, least, most, paper):
    """`numbers`: one a sample, or one Estimate. `least`, `most`: our arithmetic. `paper`: Printed or None."""
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
