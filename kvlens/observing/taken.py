"""A step as it was taken, and the pass that it is taken from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlens.observing.layers import LayerSeen
from kvlens.observing.pages import Pages
from kvlens.recording.snapshot import Measured
from kvlens.rows import EventRow


@dataclass
class Taken:
    """One step as it was taken. The token that it chose follows with the next pass."""

    position: int
    measured: Measured
    present: torch.Tensor
    """bool [L, H_kv, prompt]"""
    rewritten: torch.Tensor
    """float32 [L, H_kv, prompt]: see frames.rewritten_errors"""
    kinds: dict[str, float]
    start_us: int
    took_us: int = 0
    record_us: int = 0
    logits: torch.Tensor | None = None
    """float32 [V]; None: the pass made no logits"""
    token: int = -1
    events: list[EventRow] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """bytes on the device by layer, when the pass had ended"""
    peak: int = 0
    elsewhere: int = 0
    errors: float = 0.0
    """how far the weights are from the model's own attention output"""


@dataclass
class Pass:
    """One pass of the decoder on its way."""

    start: int
    rows: torch.Tensor
    first_row: int
    """position of the first row that is a step"""
    began_ns: int
    length_before: int
    cache: Any
    multiple: bool
    batch: int
    """rows that were fed"""
    before: list[int]
    """bytes of each layer when it began"""
    seen: dict[int, LayerSeen] = field(default_factory=dict)
    now: dict[int, int] = field(default_factory=dict)
    """bytes of each layer while it attends"""
    spent_ns: int = 0

    def follows(self, layer: int) -> bool:
        """Return True if the pass has rows that are steps, and the layer has not attended yet."""
        return len(self.rows) > 0 and layer not in self.seen

    def peak(self, held: Sequence[int]) -> int:
        """Return the most bytes on the device inside the pass. held: of each layer when it had ended."""
        return max(sum(held[:layer]) + size + sum(self.before[layer + 1 :]) for layer, size in self.now.items())


def count_fed(steps: Sequence[Taken]) -> int:
    """Return the tokens that were fed up to the last step."""
    return steps[-1].position + 1 if steps else 0


def blank(measured: Measured, windowed: frozenset[int], unsized: bool) -> None:
    """Record no full attention of layers with a sliding window. unsized: entries have another size than the keys and
    values of one KV head, so that the bytes read are not known."""
    if unsized:
        measured.kv["read_bytes"][:] = float("nan")
    for name in ("coverage", "selection_recall", "regret", "unread"):
        if name in measured.head:
            measured.head[name][sorted(windowed)] = float("nan")


def follow_pages(pages: Pages, earlier: Sequence[Taken], taken: Taken, number: int) -> None:
    """Record which pages lost tokens since the step before, and of which tokens were rewritten. number: of the step
    that was taken."""
    if earlier:
        last = earlier[-1]
        events = pages.lost(last.present, taken.present, number - 1, True)
        whole = {(event.layer, event.kv_head, event.span) for event in events if event.kind == "kept"}
        last.events += events + pages.rewritten(last.rewritten, taken.rewritten, whole, number - 1, True)
    else:
        taken.events += pages.lost(torch.ones_like(taken.present), taken.present, number, False)
        taken.events += pages.rewritten(torch.full_like(taken.rewritten, -1), taken.rewritten, set(), number, False)


def count_length(cache: Any) -> int:
    """Return the tokens that a cache holds, as it counts them; 0 for none."""
    return 0 if cache is None else int(cache.get_seq_length())


def chose_greedily(steps: Sequence[Taken], given_end: int) -> bool:
    """Return True if every step behind the given tokens chose the most probable token of its logits."""
    return all(
        step.logits is None or step.position + 1 < given_end or int(step.logits.argmax()) == step.token
        for step in steps
    )
