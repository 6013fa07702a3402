"""Holds: token ranges kept exactly on the device for chosen (layer, KV head), whatever the method does with them. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlens.shape import KVShape


@dataclass(frozen=True)
class Hold:
    """Positions [tok_start, tok_end) of a span, held exactly for some heads from a step on."""

    span: int
    """id of the span whose range this is, as the run that holds it numbers it"""
    tok_start: int
    tok_end: int
    heads: tuple[tuple[int, int], ...]
    """(layer, KV head), each once"""
    from_step: int = 0
    whole: bool = True
    """False: these are some of the span's tokens"""

    def __post_init__(self) -> None:
        if not 0 <= self.tok_start < self.tok_end:
            raise ValueError(f"span {self.span} has no tokens to hold ({self.tok_start} to {self.tok_end}).")
        if self.from_step < 0:
            raise ValueError(f"--from-step {self.from_step}: the first step is 0.")

    def as_meta(self) -> dict[str, Any]:
        """How a run's meta says it."""
        return {
            "span": self.span,
            "tok_start": self.tok_start,
            "tok_end": self.tok_end,
            "heads": [list(head) for head in self.heads],
            "from_step": self.from_step,
            "whole": self.whole,
        }


def check(holds: Sequence[Hold], shape: KVShape, positions: int) -> None:
    """Raises ValueError, one sentence, where a hold names a layer, KV head or position that the run does not have."""
    for hold in holds:
        if hold.tok_end > positions:
            raise ValueError(f"span {hold.span} ends at token {hold.tok_end}, the run has {positions} at most.")
        for layer, kv_head in hold.heads:
            if not (0 <= layer < shape.layers and 0 <= kv_head < shape.kv_heads):
                raise ValueError(
                    f"there is no layer {layer}, KV head {kv_head}: the model has {shape.layers} layers of "
                    f"{shape.kv_heads} KV heads."
                )


def held_tokens(holds: Sequence[Hold]) -> int:
    """Different positions that are held for any head."""
    return len({position for hold in holds if hold.heads for position in range(hold.tok_start, hold.tok_end)})


def held_bytes(holds: Sequence[Hold], shape: KVShape) -> int:
    """Bytes of the keys and values that are held, each (token, layer, KV head) once; without tables and unused
    slots."""
    kept: dict[tuple[int, int], set[int]] = {}
    for hold in holds:
        for head in hold.heads:
            kept.setdefault(head, set()).update(range(hold.tok_start, hold.tok_end))
    return sum(map(len, kept.values())) * shape.head_token_bytes
