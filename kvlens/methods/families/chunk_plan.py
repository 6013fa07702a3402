"""Arithmetic of runs that keep chunks of the text in the cold tier: which slots and tables a run needs, and what is
left for tokens of selected chunks. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvlens.methods.parameters import param
from kvlens.shape import KVShape
from kvlens.spans.marks import SETS
from kvlens.spans.sentences import Splitter
from kvlens.tiers.layout import Layout, Zones


@dataclass(frozen=True)
class ChunkRetrievalParameters:
    """Lengths are in tokens. A method gives its own defaults, and choices of `group`: `native` is each query head for
    itself, whatever else is one choice of the group."""

    length: int = param(14, "wanted tokens of a chunk")
    deviation: int = param(8, "how far from the wanted end a chunk may end")
    usage: float = param(
        0.0,
        "tokens attended per step, as a share of all, sinks and open chunk included; 0: as many as the memory budget "
        "holds",
    )
    of: str = param(
        "prompt",
        "what usage is a share of: the prompt, or all tokens so far, anew at every step",
        choices=("prompt", "current"),
        ours=True,
    )
    marks: str = param(
        "auto",
        "tokens that may end a chunk: one {.}, mid {. ? ! line break}, full (also ; : , dash and their wide forms); "
        "any: all punctuation with equal weights, none: no mark; auto: what suits the model",
        choices=("auto", *SETS, "any"),
        ours=True,
    )
    group: str = param("max", "how the query heads of a KV head select", choices=("max", "native"), ours=True)
    sinks: int = param(4, "first tokens always attended", ours=True)
    dense_layers: int = param(0, "first layers that keep and attend everything", ours=True)

    def __post_init__(self) -> None:
        self.splitter()
        if not 0 <= self.usage <= 1:
            raise ValueError("usage must lie between 0 and 1.")
        if self.sinks < 0 or self.dense_layers < 0:
            raise ValueError("sinks and dense_layers must be at least 0.")

    def splitter(self) -> Splitter:
        """The rule that cuts. Raises ValueError for lengths below 1."""
        return Splitter(self.length, self.deviation)


@dataclass(frozen=True)
class Plan:
    """Sizes for one run; `shape` and the number of dense layers included."""

    params: ChunkRetrievalParameters
    shape: KVShape
    numbers: int
    """of the index of one chunk of one KV head"""
    dense: int
    """first layers that keep everything"""
    sinks: int
    chunks: int
    """closed chunks of the prompt"""
    window_from: int
    """first position of the open chunk"""
    prompt_tokens: int
    max_new: int

    @property
    def compressed(self) -> int:
        """Layers that select."""
        return self.shape.layers - self.dense

    @property
    def open(self) -> int:
        """Tokens of the open chunk when decoding begins."""
        return self.prompt_tokens - self.window_from

    @property
    def _leaving(self) -> int:
        """Decoded and open tokens that may have become chunks when the last step begins."""
        return self.open + self.max_new - 1

    @property
    def closures(self) -> int:
        """Chunks that decoding may close, at most."""
        return self._leaving // self.params.splitter().least

    @property
    def rows(self) -> int:
        """Chunks at most, prompt and decoding: rows of the index."""
        return self.chunks + self.closures

    @property
    def first_id(self) -> int:
        """Span id of the first chunk; the window's is 0, and the sinks have one if there are any."""
        return 2 if self.sinks else 1

    @property
    def selectable(self) -> int:
        """Tokens that may ever lie in closed chunks."""
        return self.window_from - self.sinks + (self._leaving if self.closures else 0)

    def token_budget(self, position: int) -> int:
        """Tokens attended at a step whose input lies at `position`, sinks and open chunk included (usage > 0)."""
        share = self.prompt_tokens + 1 if self.params.of == "prompt" else position + 1
        return math.ceil(self.params.usage * share - 1e-9)

    @property
    def _readers(self) -> int:
        """Query heads that select for themselves, per KV head."""
        return self.shape.group if self.params.group == "native" else 1

    def quota(self, position: int, window_start: int, recall: int) -> int:
        """Tokens of closed chunks that one reader attends at this step."""
        if self.params.usage:
            return max(0, self.token_budget(position) - self.sinks - (position + 1 - window_start))
        return recall if recall >= self.selectable else recall // self._readers

    def wanted_recall(self) -> int | None:
        """Slots that the token budget asks for at its largest; None: the memory budget decides."""
        if not self.compressed:
            return 0
        if not self.params.usage:
            return None
        largest = (
            max(self.token_budget(p) for p in (self.prompt_tokens, self.prompt_tokens + self.max_new - 1))
            - self.sinks
            - 1
        )
        return min(self.selectable, self._readers * max(0, largest))

    def least_recall(self) -> int:
        """Slots without which the run is refused: the token budget's, or room for the longest chunk for every
        reader."""
        requested = self.wanted_recall()
        return min(self.selectable, self._readers * self.params.splitter().most) if requested is None else requested

    def recall_within(self, budget: int | None) -> int | None:
        """Slots for tokens of selected chunks; None when even the fewest do not fit."""
        least = self.least_recall()
        if budget is None:
            return least if self.params.usage else self.selectable
        spare = budget - self.bytes(least)
        if spare < 0 or self.params.usage or not self.compressed:
            return None if spare < 0 else least
        return min(
            self.selectable,
            least + spare * self.shape.layers // (self.compressed * Zones(1, 0, 0, 0).bytes(self.shape)),
        )

    def layout(self, recall: int) -> Layout:
        """With `recall` slots for tokens of selected chunks."""
        most = self.params.splitter().most
        ring = min(max(most, self.open + 1), self.open + self.max_new)
        selecting = Zones(self.sinks, 0, recall, ring)
        dense = Zones(self.window_from, 0, 0, self.open + self.max_new)
        zones = (dense,) * self.dense + (selecting,) * self.compressed
        return Layout(zones, self.first_id + self.rows, window_from=self.window_from, dense=tuple(range(self.dense)))

    def table_bytes(self, rows: int) -> int:
        """Index of `rows` chunks."""
        return self.compressed * self.shape.kv_heads * rows * self.numbers * self.shape.itemsize

    def bytes(self, recall: int) -> int:
        """Device bytes: slots, index, lengths and quota, and a chunk on its way out of the window."""
        tables = self.table_bytes(self.rows) + 8 * (self.rows + 1) if self.compressed else 0
        longest = min(self.params.splitter().most, self._leaving) if self.compressed and self.closures else 0
        return self.layout(recall).bytes(self.shape) + tables + longest * self.shape.token_bytes


def expected(
    params: ChunkRetrievalParameters,
    shape: KVShape,
    numbers: int,
    prompt_tokens: int,
    max_new: int,
    length: int | None = None,
) -> Plan:
    """Sizes for a text that is not known yet: chunks of `length`, the wanted one where none is given."""
    length = length or params.length
    sinks = min(params.sinks, prompt_tokens)
    chunks = max(0, prompt_tokens - sinks - 1) // length
    return Plan(
        params,
        shape,
        numbers,
        min(params.dense_layers, shape.layers),
        sinks,
        chunks,
        sinks + chunks * length,
        prompt_tokens,
        max_new,
    )


def of_chunks(
    params: ChunkRetrievalParameters,
    shape: KVShape,
    numbers: int,
    ends: Sequence[int],
    sinks: int,
    prompt_tokens: int,
    max_new: int,
    dense: int,
) -> Plan:
    """Sizes for closed chunks of the prompt that end at `ends`."""
    window_from = ends[-1] if ends else min(sinks, prompt_tokens)
    return Plan(params, shape, numbers, dense, sinks, len(ends), window_from, prompt_tokens, max_new)
