"""Two arms of a study compared on the prompts that both were run on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvlens.statistics import sign_test
from kvlens.statistics.mcnemar import ERROR, LEAST_SPLITS, POWER, decides, detectable, prompts_needed
from kvlens.statistics.paired import tango
from kvlens.studies.table import Results
from kvlens.text.units import counted


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
    """95 % interval of the difference of shares, A minus B: Tango's score interval, extended to 0 unless `decided`"""
    p: float
    """two-sided exact McNemar test"""
    needed: int | None
    """prompts that decide with a probability of POWER if the shares stay as they were seen; None: no difference was
    seen"""

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
        """McNemar's exact test tells the arms apart: p is below ERROR."""
        return decides(self.only_a, self.only_b)


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
    if not decides(gained, lost):
        low, high = min(low, 0.0), max(high, 0.0)
    p = sign_test(gained, lost) if splits else 1.0
    needed = None if gained == lost else prompts_needed(gained / n, lost / n)
    return Paired(n, both, n - both - len(splits), splits, low, high, p, needed)


def plan_text(prompts: int, arms: int) -> str:
    """Return what a study would run, and the smallest difference that it could show."""
    smallest = detectable(prompts)
    size = counted(prompts, "prompt")
    sizes = f"{size} x {counted(arms, 'arm')} = {counted(prompts * arms, 'trial')}."
    if smallest is None:
        reason = f"McNemar's exact test needs {LEAST_SPLITS} that one arm alone answers"
        return f"{sizes} {size} cannot show which of two arms answers more: {reason}."
    return (
        f"{sizes} {size} would probably ({POWER:.0%}) show a difference of {100 * smallest:.3g} points or more by "
        "McNemar's exact test, if one of the two arms is never right alone."
    )


def sentence_of(paired: Paired, a: str, b: str) -> str:
    """Return what a comparison says, in three sentences at most."""
    if not paired.n:
        return f"No prompt has an answer that is judged under both {a} and {b}."
    rights = paired.both + paired.only_a, paired.both + paired.only_b
    text = (
        f"{a} is right on {rights[0]} and {b} on {rights[1]} of {counted(paired.n, 'prompt')}: "
        f"difference {paired.difference:+.3f} (95 % {paired.low:+.3f} to {paired.high:+.3f})."
    )
    if paired.decided:
        return f"{text} McNemar's exact test decides: p = {paired.p:.3g}, below {ERROR:g}."
    text = f"{text} McNemar's exact test does not decide: p = {paired.p:.3g}, not below {ERROR:g}."
    if paired.needed is None:
        return text
    return f"{text} About {paired.needed:,} prompts would probably ({POWER:.0%}) decide, if these shares stay."
