"""Turns results into verdicts. The interval of the samples is compared with the range of the published figure, or with
the range that our arithmetic expects.

An interval lies inside a range, outside it, or across its edge. Across the edge nothing is reproduced, however close
the median is to the middle of the range. """
import random
import statistics
from dataclasses import dataclass

RESAMPLES = 1000
# With fewer samples no bootstrap gives a 95 % interval (the extremes of 5 samples cover 94 %), so the whole range is
# taken.
FEWEST = 6

# The first three compare with a published figure, the next two with our own range.
YES, NO, ELSEWHERE, MISSING = "reproduced", "not reproduced", "not comparable here", "no result"
EXPECTED, UNEXPECTED = "as expected", "not as expected"


def interval(numbers):
    """95 % bootstrap interval of the median, by percentiles. Every call with the same numbers returns the same
    interval."""
    if len(numbers) < FEWEST or min(numbers) == max(numbers):
        return min(numbers), max(numbers)
    dice = random.Random(1)
    medians = sorted(statistics.median(dice.choices(numbers, k=len(numbers))) for _ in range(RESAMPLES))
    return medians[int(.025 * RESAMPLES)], medians[int(.975 * RESAMPLES) - 1]


def against(low, high, least, most):
    """Where the interval [low, high] lies to the range [least, most]: "in", "out" or "across" an edge."""
    slack = 1e-6 * max(abs(least), abs(most))  # ranges have six digits
    if least - slack <= low and high <= most + slack:
        return "in"
    return "out" if high < least - slack or low > most + slack else "across"


@dataclass
class Evidence:
    verdict: str
    middle: float = None
    low: float = None
    high: float = None
    n: int = 0
    paper: str = ""  # where the interval lies to the published range; "": there is none to compare
    expected: str = ""  # and to the expected range
    why: str = ""  # why there is no result, or why it is outside the range


def decide(numbers, claim):
    """The evidence of a claim (claims.Claim) from one number a sample."""
    low, high = interval(numbers)
    found = Evidence("", statistics.median(numbers), low, high, len(numbers))
    found.expected = against(low, high, claim.low, claim.high)
    if claim.comparable:
        found.paper = against(low, high, claim.paper_low, claim.paper_high)
    target = found.paper or found.expected
    if claim.paper and not claim.comparable and found.expected == "in":
        found.verdict = ELSEWHERE
    elif claim.paper:
        found.verdict = YES if target == "in" else NO
    else:
        found.verdict = EXPECTED if target == "in" else UNEXPECTED
    if found.verdict in (NO, UNEXPECTED):
        across = "the interval crosses an edge of the range" if target == "across" else ""
        found.why = claim.differs or across
    return found
