"""Where an answer tips: bisection of one number between a value that loses the answer and one that keeps it. Pure: what
a test is, the caller says.

Both ends are tested first. The bracket is then halved. At last the widest gap on either side is tested, because
bisection alone never sees an answer that is lost, right and lost again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

MOST = 12
"""values that a search tests, where nothing else is said"""


@dataclass(frozen=True)
class Probe:
    """One value that was tried."""

    value: float
    right: bool
    """the answer is right there; where none is known, the output is full KV's"""
    uid: str
    """of its run"""


@dataclass(frozen=True)
class Tip:
    """What is known of where an answer tips."""

    axis: str
    """budget, or a parameter"""
    probes: tuple[Probe, ...]
    """in the order of their values"""

    @property
    def changes(self) -> list[tuple[Probe, Probe]]:
        """Neighbours of which one is right and one lost."""
        return [(a, b) for a, b in pairwise(self.probes) if a.right != b.right]

    @property
    def state(self) -> str:
        """tips | not_monotone | always_right | always_lost | nothing: no value was tried."""
        if not self.probes:
            return "nothing"
        if not self.changes:
            return "always_right" if self.probes[0].right else "always_lost"
        return "tips" if len(self.changes) == 1 else "not_monotone"

    @property
    def lost(self) -> Probe | None:
        """The lost value beside the right one; None unless the answer tips once."""
        return next((probe for probe in self._pair() if not probe.right), None)

    @property
    def right(self) -> Probe | None:
        """The right value beside the lost one; None unless the answer tips once."""
        return next((probe for probe in self._pair() if probe.right), None)

    def _pair(self) -> tuple[Probe, ...]:
        return self.changes[0] if self.state == "tips" else ()

    def words(self, value: float) -> str:
        """A value as a person reads it: '31.2 %', 'tau 0.7'."""
        return f"{value:g} %" if self.axis == "budget" else f"{self.axis} {value:g}"

    @property
    def sentence(self) -> str:
        """What came of the search."""
        if self.lost is not None and self.right is not None:
            return f"Lost at {self.words(self.lost.value)}, right at {self.words(self.right.value)}."
        if not self.probes:
            return "No value was tried."
        span = f"{self.words(self.probes[0].value)} to {self.words(self.probes[-1].value)}"
        if self.state != "not_monotone":
            word = "Right" if self.probes[0].right else "Lost"
            return f"{word} at all {len(self.probes)} values tried, {span}: it does not tip there."
        turns = [self.probes[0], *(later for _, later in self.changes)]
        phrases = ", ".join(f"{'right' if turn.right else 'lost'} from {self.words(turn.value)}" for turn in turns)
        return f"Not monotone, so there is no single tipping point: {phrases}."


def find_tip(
    axis: str,
    test: Callable[[float], Probe],
    low: float,
    high: float,
    resolution: float,
    most: int = MOST,
    stored: Iterable[Probe] = (),
    rounded: Callable[[float], float] = lambda value: value,
) -> Tip:
    """Search for the tip between two values.

    Args:
        test: runs a value.
        resolution: the distance of a lost and a right value at which the search ends.
        most: values that are tested at most; the two ends always are.
        stored: values that were tried before.
        rounded: makes a value one that can be tested.
    """
    probes = {probe.value: probe for probe in stored if low <= probe.value <= high}
    tested = 0

    def tip() -> Tip:
        return Tip(axis, tuple(probes[value] for value in sorted(probes)))

    def try_between(a: float, b: float) -> bool:
        """Test the middle of two values; False where there is none between them, or nothing more may be tested."""
        nonlocal tested
        middle = rounded((a + b) / 2)
        if tested >= most or not a < middle < b or middle in probes:
            return False
        probes[middle] = test(middle)
        tested += 1
        return True

    for end in (low, high):
        if end not in probes:
            probes[end] = test(end)
            tested += 1
    while tip().state == "tips":
        (a, b) = tip().changes[0]
        if b.value - a.value <= resolution or not try_between(a.value, b.value):
            break
    if tip().state == "tips":
        (a, b) = tip().changes[0]
        for start, end in ((low, a.value), (b.value, high)):
            values = [value for value in sorted(probes) if start <= value <= end]
            if len(values) > 1:
                try_between(*max(pairwise(values), key=lambda gap: gap[1] - gap[0]))
    return tip()
