"""What a static step tells of itself: rings on the device with a row per step, read by the host once per turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from kvlens.shape import KVShape
from kvlens.tiers.slots import FREE, ROLE, Slots

Record = Literal["heads", "spans"]
"""heads: masses of every query head by role, tokens attended, bytes moved; spans: the mass of every span besides"""


@dataclass
class RingRecord:
    """Steps so far. mass float32 [T, L, Hq, roles]: attention mass by role of the entry (kvlens.rows.ROLES); attended,
    moved int64 [T, L, H_kv] tokens in the softmax, [T, 2, L, H_kv] bytes moved before the attention and after it; spans
    float16 [T, L, H_kv, S]: attention mass of each span, mean over the query heads of the group (S = 0: not
    recorded)."""

    mass: np.ndarray
    attended: np.ndarray
    moved: np.ndarray
    spans: np.ndarray


@dataclass
class Ring:
    """Rings of `steps` rows. `spans`: span ids whose masses are recorded, 0: none. What is told changes no output."""

    steps: int
    shape: KVShape
    device: torch.device
    spans: int = 0
    _flushed: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    _waiting: int = 0

    def __post_init__(self) -> None:
        steps, layers, heads = self.steps, self.shape.layers, self.shape.kv_heads
        self.row = torch.zeros(1, dtype=torch.long, device=self.device)
        self.mass = torch.zeros(steps, layers, self.shape.q_heads, len(ROLE), device=self.device)
        self.attended = torch.zeros(steps, layers, heads, dtype=torch.long, device=self.device)
        self.moved = torch.zeros(steps, 2, layers, heads, dtype=torch.long, device=self.device)
        self.by_span = torch.zeros(steps, layers, heads, self.spans, dtype=torch.float16, device=self.device)

    @property
    def _rings(self) -> tuple[torch.Tensor, ...]:
        return self.mass, self.attended, self.moved, self.by_span

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.row, *self._rings))

    # ---- in the step
    def begin(self) -> None:
        self.moved.index_fill_(0, self.row, 0)

    def attention(self, layer: int, slots: Slots, weights: torch.Tensor, seen: torch.Tensor) -> None:
        """One layer's attention: weights [H_kv, G, C] of its slots, seen bool [H_kv, C]: slots that a query head
        attends."""
        role = slots.role.long()
        by_role = weights.new_zeros(*weights.shape[:2], FREE + 1)
        by_role = by_role.scatter_add(-1, role[:, None].expand_as(weights), weights)[..., : len(ROLE)]
        self.mass[:, layer].index_copy_(0, self.row, by_role.flatten(0, 1)[None])
        exact = seen & (role != ROLE["coarse"])
        self.attended[:, layer].index_copy_(0, self.row, exact.sum(-1)[None])
        if self.spans:
            by_span = weights.new_zeros(weights.shape[0], self.spans).scatter_add(
                -1, slots.span.long(), weights.mean(1)
            )
            self.by_span[:, layer].index_copy_(0, self.row, by_span.half()[None])

    def recalled(self, layer: int, moved: torch.Tensor, later: bool) -> None:
        """moved int64 [H_kv] bytes."""
        self.moved[:, int(later), layer].index_copy_(0, self.row, moved[None])

    def end(self) -> None:
        self.row.copy_((self.row + 1) % self.steps)

    # ---- between steps
    def stepped(self) -> None:
        """The host knows that a step has been issued; a full ring is read."""
        self._waiting += 1
        if self._waiting == self.steps:
            self._flushed.append(self._rows())
            self._waiting = 0

    def _rows(self) -> tuple[np.ndarray, ...]:
        """Copies of the rows that have been written since the ring was last read."""
        return tuple(x[: self._waiting].numpy(force=True).copy() for x in self._rings)

    def collect(self) -> RingRecord:
        """All steps so far, those still in the ring included."""
        return RingRecord(*(np.concatenate(part) for part in zip(*self._flushed, self._rows(), strict=True)))
