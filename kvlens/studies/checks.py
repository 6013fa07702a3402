"""The checks of a gate: whether an arm of a study differs from full KV by more than its thresholds allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvlens import methods
from kvlens.statistics import wilson
from kvlens.statistics.paired import tango
from kvlens.studies.errors import BadStudy
from kvlens.studies.limits import Thresholds
from kvlens.studies.paired import Paired, compare
from kvlens.studies.plan import Arm
from kvlens.studies.table import Results, estimated

MOST_PROMPTS = 1_000_000
"""prompts up to which a number of prompts that would decide is searched"""
LEAST_FOR_MEAN = 6
"""prompts below which a mean has no interval (kvlens.statistics.of_mean)"""


@dataclass(frozen=True)
class Check:
    """One threshold of one arm."""

    arm: str
    """its label"""
    threshold: str
    """ran, lost, changed, kl_mean_nats or group_lost"""
    state: str
    """passed | missed | undecided: the estimate is within the limit, the interval is not | not_run"""
    limit: float
    value: float
    """the estimate; NaN: nothing was judged"""
    low: float
    high: float
    """95 % interval; NaN: none, as of group_lost, which is judged as counted"""
    n: int
    """prompts judged"""
    group: str = ""
    """the worst group of prompts, of group_lost"""
    needed: int | None = None
    """prompts that would decide, if the estimate stays; None: not known"""

    @property
    def passed(self) -> bool:
        """The arm keeps to the threshold."""
        return self.state == "passed"

    @property
    def sentence(self) -> str:
        """What came of it."""
        if self.threshold == "ran":
            return f"{self.n} prompts ran to their end, {self.limit:.0f} are in the study."
        if not self.n:
            return "No prompt could be judged."
        interval = " as counted" if self.threshold == "group_lost" else ""
        if not math.isnan(self.high):
            interval = f" (95 % {self.low:.3g} to {self.high:.3g})"
        where = f" in group {self.group}" if self.group else ""
        text = f"{self.value:.3g}{interval}{where} on {self.n} prompts; the limit is {self.limit:g}."
        return (
            f"{text} About {self.needed:,} prompts would decide if the estimate stays."
            if self.needed is not None
            else text
        )


def checks(results: Results, thresholds: Thresholds) -> list[Check]:
    """Return every threshold of every arm but full KV's, arm by arm; the first of an arm says whether all of its
    prompts ran."""
    names = results.labels
    rows: list[Check] = []
    for arm in results.arms:
        if arm.method != methods.REFERENCE:
            rows += _arm_checks(results, thresholds, arm, names[arm.key()])
    return rows


def _arm_checks(results: Results, thresholds: Thresholds, arm: Arm, label: str) -> Iterator[Check]:
    figures = [trial.figures or {} for trial in results.trials if trial.arm == arm.key() and trial.state == "completed"]
    count, planned = len(figures), len(results.prompts)
    state = "passed" if count == planned else "not_run"
    yield Check(label, "ran", state, planned, count, math.nan, math.nan, count)
    limits = thresholds.limits
    if (limit := limits.get("lost")) is not None:
        yield _lost(label, limit, compare(results, _full(arm).key(), arm.key()))
    if (limit := limits.get("changed")) is not None:
        outputs = [not each["same_output"] for each in figures if "same_output" in each]
        yield _changed(label, limit, sum(outputs), len(outputs))
    if (limit := limits.get("kl_mean_nats")) is not None:
        yield _kl(label, limit, [float(each["kl_mean_nats"]) for each in figures if "kl_mean_nats" in each])
    if (limit := limits.get("group_lost")) is not None:
        yield _worst_group(results, label, limit, arm)


def _full(arm: Arm) -> Arm:
    """The arm of full KV that an arm was compared with."""
    return Arm(method=methods.REFERENCE, question=arm.question, seed=arm.seed)


def _lost(label: str, limit: float, paired: Paired) -> Check:
    n, lost, gained = paired.n, paired.only_a, paired.only_b
    if not n:
        return Check(label, "lost", "undecided", limit, math.nan, math.nan, math.nan, 0)
    state = _state(paired.difference, paired.high, limit)
    needed = None
    if state == "undecided":
        needed = least(lambda count: tango(round(lost / n * count), round(gained / n * count), count)[1] <= limit, n)
    return Check(label, "lost", state, limit, paired.difference, paired.low, paired.high, n, needed=needed)


def _changed(label: str, limit: float, count: int, n: int) -> Check:
    if not n:
        return Check(label, "changed", "undecided", limit, math.nan, math.nan, math.nan, 0)
    low, high = wilson(count / n, n)
    state = _state(count / n, high, limit)
    needed = least(lambda more: wilson(count / n, more)[1] <= limit, n) if state == "undecided" else None
    return Check(label, "changed", state, limit, count / n, low, high, n, needed=needed)


def _kl(label: str, limit: float, values: list[float]) -> Check:
    if not values:
        return Check(label, "kl_mean_nats", "undecided", limit, math.nan, math.nan, math.nan, 0)
    mean, low, high = estimated(values, "kl_mean_nats")
    needed = LEAST_FOR_MEAN if math.isnan(high) and mean <= limit else None
    return Check(label, "kl_mean_nats", _state(mean, high, limit), limit, mean, low, high, len(values), needed=needed)


def _worst_group(results: Results, label: str, limit: float, arm: Arm) -> Check:
    """The group that lost the largest share of right answers, as counted."""
    worst: tuple[float, str, Paired] | None = None
    groups = sorted({prompt.group for prompt in results.prompts})
    for group in groups:
        paired = compare(results.of_group(group), _full(arm).key(), arm.key())
        if paired.n and (worst is None or paired.difference > worst[0]):
            worst = paired.difference, group, paired
    if worst is None:
        return Check(label, "group_lost", "undecided", limit, math.nan, math.nan, math.nan, 0)
    value, group, paired = worst
    state = "passed" if value <= limit else "missed"
    return Check(label, "group_lost", state, limit, value, math.nan, math.nan, paired.n, group)


def _state(value: float, high: float, limit: float) -> str:
    """A bound that is NaN keeps to no limit."""
    if high <= limit:
        return "passed"
    return "missed" if value > limit else "undecided"


def least(decides: Callable[[int], bool], start: int = 1) -> int | None:
    """Return the smallest count from `start` on that decides, where larger counts decide as well; None beyond
    MOST_PROMPTS."""
    high = max(1, start)
    while not decides(high):
        if high >= MOST_PROMPTS:
            return None
        high = min(2 * high, MOST_PROMPTS)
    low = max(1, start) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


def prompts_for(thresholds: Thresholds) -> dict[str, int]:
    """Return threshold -> the prompts below which even an arm that never differs from full KV cannot pass it."""
    rules: dict[str, Callable[[float], int | None]] = {
        "lost": lambda limit: least(lambda count: tango(0, 0, count)[1] <= limit),
        "changed": lambda limit: least(lambda count: wilson(0.0, count)[1] <= limit),
        "kl_mean_nats": lambda limit: LEAST_FOR_MEAN,
    }
    counts = {name: rules[name](limit) for name, limit in thresholds.limits.items() if name in rules}
    return {name: MOST_PROMPTS + 1 if count is None else count for name, count in counts.items()}


def check_possible(thresholds: Thresholds, prompts: int, answered: int) -> None:
    """Raise BadStudy `too_few_prompts` where no arm could pass, before anything is run.

    Args:
        prompts: of the study.
        answered: of these, how many have a known answer.
    """
    if not thresholds.limits:
        raise BadStudy(
            "no_threshold", "a gate needs a threshold: set lost, changed, kl_mean_nats or group_lost in [gate]."
        )
    for name, needed in prompts_for(thresholds).items():
        count = answered if name == "lost" else prompts
        if count < needed:
            kind = "prompts with an answer" if name == "lost" else "prompts"
            limit = thresholds.limits[name]
            sentence = (
                f"{name} = {limit:g} needs at least {needed:,} {kind}; the study has {count:,}: add prompts, "
                "or raise the limit."
            )
            raise BadStudy("too_few_prompts", sentence)
    if "group_lost" in thresholds.limits and not answered:
        raise BadStudy("too_few_prompts", "group_lost needs prompts with an answer; the study has none.")
