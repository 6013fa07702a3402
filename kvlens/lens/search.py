"""Greedy search for few (layer, KV head) that suffice. Pure: what a trial is, the caller says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Head = tuple[int, int]
"""(layer, KV head)"""
MOST = 40
"""sets that a search for the fewest bytes tries, where nothing else is said"""


@dataclass(frozen=True)
class Measured:
    """What holding for some heads came to."""

    kl: float
    """what the search makes small"""
    agrees: bool
    """the likeliest token at the step of loss is full KV's: worth asking whether the answer is back"""


@dataclass
class SearchResult:
    """What the search came to."""

    heads: tuple[Head, ...]
    """that bring the answer back, none of which can be left out; empty where not even all of them do"""
    everywhere: bool
    """holding for all candidates brings the answer back"""
    tried: int
    """sets of heads that were tried"""
    kl: float
    """of `heads`, or of all candidates where these are empty"""
    alone: list[tuple[Head, float]] = field(default_factory=list)
    """what each candidate came to by itself, best first"""


class Search:
    """One search. `measure` and `restored` each cost a run; sets that were tried are not tried again."""

    def __init__(
        self,
        measure: Callable[[tuple[Head, ...]], Measured],
        restored: Callable[[tuple[Head, ...]], bool],
        tried: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._measure, self._restored, self._tell = measure, restored, tried
        self._measured: dict[frozenset[Head], Measured] = {}
        self._back: dict[frozenset[Head], bool] = {}

    def run(self, candidates: Sequence[Head]) -> SearchResult:
        """Add the candidate that lowers the divergence most until the answer is back, then leave out what is not
        needed.

        In every round each candidate with which the token at the step of loss is right is asked first whether the
        answer is back, so that a single head that suffices is found even if another one lowers the divergence more.
        """
        everything = tuple(candidates)
        if not self._answers(everything):
            return SearchResult((), False, self.count_tried, self._look(everything).kl)
        heads, alone = self._forward(candidates)
        needed_heads = self._prune(heads)
        return SearchResult(tuple(sorted(needed_heads)), True, self.count_tried, self._look(needed_heads).kl, alone)

    @property
    def count_tried(self) -> int:
        """Sets of heads so far."""
        return len(self._measured.keys() | self._back.keys())

    def _forward(self, candidates: Sequence[Head]) -> tuple[tuple[Head, ...], list[tuple[Head, float]]]:
        heads: tuple[Head, ...] = ()
        alone: list[tuple[Head, float]] = []
        while True:
            remaining = [head for head in candidates if head not in heads]
            looks = sorted(
                ((head, self._look((*heads, head))) for head in remaining), key=lambda pair: (pair[1].kl, pair[0])
            )
            alone = alone or [(head, look.kl) for head, look in looks]
            for head, look in looks:
                if look.agrees and self._answers((*heads, head)):
                    return (*heads, head), alone
            heads = (*heads, looks[0][0])
            if self._answers(heads):
                return heads, alone

    def _prune(self, heads: tuple[Head, ...]) -> tuple[Head, ...]:
        """Leave out one head after the other, the first chosen last, as long as the answer stays."""
        for head in reversed(heads):
            fewer = tuple(other_head for other_head in heads if other_head != head)
            if fewer and self._answers(fewer):
                heads = fewer
        return heads

    def _look(self, heads: tuple[Head, ...]) -> Measured:
        key = frozenset(heads)
        if key not in self._measured:
            self._measured[key] = self._measure(heads)
            self._tell(self.count_tried)
        return self._measured[key]

    def _answers(self, heads: tuple[Head, ...]) -> bool:
        key = frozenset(heads)
        if key not in self._back:
            self._back[key] = self._restored(heads)
            self._tell(self.count_tried)
        return self._back[key]
