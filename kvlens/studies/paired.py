"""Two arms of a study compared on the prompts that both were run on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from kvlens.statistics import sign_test
from kvlens.statistics.paired import tango
from kvlens.studies.table import Results
from kvlens.text.units import counted

ERROR, POWER = 0.05, 0.8
"""chance to see a difference that is not there (two-sided), and to see one that is"""


@dataclass(frozen=True)
class Split:
    """A prompt that only one of two arms answers right."""

    prompt: str
    uid_a: str | None
    uid_b: str | None
    right: str
    """'a' or 'b'"""


@dataclass(frozen=True)
class Paired:
    """Arm A beside arm B."""

    n: int
    """prompts whose answers are judged under both"""
    both: int
    neither: int
    splits: tuple[Split, ...]
    """prompts that only one answers right"""
    low: float
    high: float
    """95 % interval of the difference of shares, A minus B (Tango's score interval)"""
    p: float
    """two-sided exact McNemar test"""
    needed: int | None
    """prompts that would decide a difference as large as the one seen; None: no difference was seen"""

    @property
    def only_a(self) -> int:
        """Prompts that only A answers right."""
        return sum(split.right == "a" for split in self.splits)

    @property
    def only_b(self) -> int:
        """Prompts that only B answers right."""
        return sum(split.right == "b" for split in self.splits)

    @property
    def difference(self) -> float:
        """Share of right answers, A minus B."""
        return (self.only_a - self.only_b) / self.n if self.n else math.nan

    @property
    def decided(self) -> bool:
        """The interval does not hold 0."""
        return self.n > 0 and not self.low <= 0 <= self.high


def compare(results: Results, a: str, b: str) -> Paired:
    """Return arm `a` beside arm `b`, by their keys or labels. Raises ValueError with one sentence for an arm that the
    study does not have."""
    frame = results.frame()
    keys = [results.arm(name).key() for name in (a, b)]
    rows = []
    for key in keys:
        part = frame[(frame["arm"] == key) & (frame["state"] == "completed")] if len(frame) else frame
        judged = part[part["right"].notna()] if "right" in part else part.iloc[:0]
        columns = zip(judged["prompt"], judged["right"] if len(judged) else (), judged["uid"], strict=True)
        rows.append(
            {str(prompt): (bool(right), uid if isinstance(uid, str) else None) for prompt, right, uid in columns}
        )
    answers_a, answers_b = rows
    shared = [prompt for prompt in answers_a if prompt in answers_b]
    splits = tuple(
        Split(prompt, answers_a[prompt][1], answers_b[prompt][1], "a" if answers_a[prompt][0] else "b")
        for prompt in shared
        if answers_a[prompt][0] != answers_b[prompt][0]
    )
    both = sum(answers_a[prompt][0] and answers_b[prompt][0] for prompt in shared)
    n, gained = len(shared), sum(split.right == "a" for split in splits)
    lost = len(splits) - gained
    low, high = tango(gained, lost, n) if n else (-1.0, 1.0)
    p = sign_test(gained, lost) if splits else 1.0
    needed = None if gained == lost else prompts_needed(gained / n, lost / n)
    return Paired(n, both, n - both - len(splits), splits, low, high, p, needed)


def prompts_needed(only_a: float, only_b: float) -> int:
    """Return how many prompts show that two shares differ, with a chance of POWER and a two-sided error of ERROR.

    A alone is right on a share `only_a` of them, B alone on `only_b` (Connor 1987, for McNemar's test). Raises
    ValueError where the two do not differ."""
    if only_a == only_b:
        raise ValueError("two shares that are the same need no number of prompts to be told apart.")
    split, difference = only_a + only_b, abs(only_a - only_b)
    alpha, beta = NormalDist().inv_cdf(1 - ERROR / 2), NormalDist().inv_cdf(POWER)
    root = alpha * math.sqrt(split) + beta * math.sqrt(max(0.0, split - difference**2))
    return math.ceil((root / difference) ** 2)


def detectable(n: int) -> float | None:
    """Return the smallest difference of two shares that `n` prompts show with a chance of POWER, where only one of two
    arms is ever right alone; None where `n` is too small for any."""
    steps = (step / 1000 for step in range(1, 1001))
    return next((share for share in steps if prompts_needed(share, 0.0) <= n), None)


def plan_text(prompts: int, arms: int) -> str:
    """Return what a study would run, and the smallest difference that it could show."""
    smallest = detectable(prompts)
    size = counted(prompts, "prompt")
    sizes = f"{size} x {counted(arms, 'arm')} = {counted(prompts * arms, 'trial')}."
    if smallest is None:
        return f"{sizes} {size} cannot show which of two arms answers more."
    return (
        f"{sizes} With a chance of {POWER:.0%}, {size} show that one arm answers {smallest:.0%} more than another, "
        "which answers none alone."
    )


def sentence_of(paired: Paired, a: str, b: str) -> str:
    """Return what a comparison says, in two sentences at most."""
    if not paired.n:
        return f"No prompt has an answer that is judged under both {a} and {b}."
    rights = paired.both + paired.only_a, paired.both + paired.only_b
    text = (
        f"{a} is right on {rights[0]} and {b} on {rights[1]} of {paired.n} prompts: "
        f"difference {paired.difference:+.3f} (95 % {paired.low:+.3f} to {paired.high:+.3f}), "
        f"McNemar's p = {paired.p:.3g}."
    )
    if paired.decided or paired.needed is None:
        return text
    return f"{text} {paired.needed} prompts would decide a difference of this size."
