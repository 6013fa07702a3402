"""The oracle frontier: the fewest resident bytes that keep an answer, as one search finds them.

Full KV runs with only the (layer, KV head, page) that its own attention weighs most, and the share that is kept is
halved in until the answer is lost. A method that knew full KV's attention of the whole answer could have kept no more.
The search does not try other orders, so the figure is an upper bound of the fewest bytes. Ours; no paper does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvlens.holds import Drop
from kvlens.ledger.story import Story

if TYPE_CHECKING:
    from kvlens.lens.trials import Trials

TRIES = 8
"""sets that a search tries"""
FEWEST = 1 / 1024
"""smallest share of all (layer, KV head, page) that is tried"""


@dataclass(frozen=True)
class Frontier:
    """The fewest resident bytes that were found to keep an answer."""

    resident_bytes: int
    """keys and values of the pages kept, and of the tokens behind the prompt's pages"""
    full_bytes: int
    """the same of full KV"""
    pages: int
    """(layer, KV head, page) that were kept"""
    end: int
    """the step after the answer that was kept"""
    tried: int

    def __post_init__(self) -> None:
        for name, figure in vars(self).items():
            if type(figure) is not int or figure < 0:
                raise ValueError(f"the frontier's {name} is no count")
        if not 0 < self.resident_bytes <= self.full_bytes:
            raise ValueError("the frontier keeps more than full KV, or nothing")

    @property
    def share(self) -> float:
        """Of full KV's bytes, 0..1."""
        return self.resident_bytes / self.full_bytes

    def distance(self, resident_bytes: float) -> float:
        """Return how many times the frontier's bytes a method had resident."""
        return resident_bytes / self.resident_bytes


def find_frontier(
    full: Callable[[tuple[Drop, ...]], Trials],
    end: int,
    tries: int = TRIES,
    first_token: int = 0,
    report: Callable[[int, int], None] = lambda count, total: None,
) -> Frontier:
    """Return the frontier of one answer. full(drops): repeats of full KV with drops; end: the step after the answer;
    first_token: the first step that counts; report(count, total): hears of the sets tried. An answer is kept if every
    step before `end` has full KV's token."""
    whole = full(())
    story = Story(whole.engine.loaded.shape)
    whole.followed(end, story)
    mass = _mass(story)
    spans = {row.span: row for row in story.spans if row.kind != "window" and row.born_step < 0}
    places = [place for place in np.ndindex(mass.shape) if place[2] in spans]
    order = sorted(places, key=lambda place: -mass[place])
    token_bytes = story.shape.head_token_bytes
    positions = max(row.tok_end for row in spans.values())
    trailing_tokens = len(whole.prompt.ids) + end - 1 - positions
    loose = trailing_tokens * story.shape.token_bytes

    def kept_bytes(count: int) -> int:
        return sum(spans[span].tok_end - spans[span].tok_start for _, _, span in order[:count]) * token_bytes + loose

    def keeps(count: int) -> bool:
        heads: dict[int, list[tuple[int, int]]] = {}
        for layer, head, span in order[count:]:
            heads.setdefault(span, []).append((layer, head))
        drops = tuple(
            Drop(span, spans[span].tok_start, spans[span].tok_end, tuple(sorted(span_heads)))
            for span, span_heads in heads.items()
        )
        losses = full(drops).followed(end).losses
        return all(loss is None or loss.agrees for loss in losses[first_token:])

    most, least = len(order), max(1, int(len(order) * FEWEST))
    tried = 0
    while tried < tries and most - least > 1:
        middle = max(least + 1, min(most - 1, round(math.sqrt(most * least))))
        report(tried, tries)
        tried += 1
        if keeps(middle):
            most = middle
        else:
            least = middle
    return Frontier(kept_bytes(most), kept_bytes(len(order)), most, end, tried)


def _mass(story: Story) -> np.ndarray:
    """Return float64 [L, H_kv, S]: full KV's attention on each span, added over steps and the query heads of a
    group."""
    mass = np.zeros(story.size)
    for record in story.steps:
        oracle = record.oracle
        if oracle is None:
            continue
        layer, head, place = np.nonzero((oracle.span >= 0) & (oracle.span < story.count))
        where = layer, head // story.shape.group, oracle.span[layer, head, place]
        np.add.at(mass, where, oracle.full[layer, head, place].astype(np.float64))
    return mass
