"""What a static step tells of itself: rings on the device with a row per step, read by the host once per turn."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvlens.kernels.attend import attention_weights
from kvlens.memory import FREE, ROLE
from kvlens.memory.hot import Slots
from kvlens.shape import KVShape


@dataclass
class Told:
    """Steps so far. mass float32 [T, L, Hq, roles]: attention mass by role of the entry (kvlens.rows.ROLES); attended, moved int64
    [T, L, H_kv] tokens in the softmax, [T, 2, L, H_kv] tokens moved before the attention and after it."""

    mass: np.ndarray
    attended: np.ndarray
    moved: np.ndarray


@dataclass
class Ring:
    """Rings of `steps` rows. Weights are computed beside the fused attention, so what is told changes no output."""

    steps: int
    shape: KVShape
    device: torch.device
    _flushed: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    _waiting: int = 0

    def __post_init__(self) -> None:
        steps, layers, heads = self.steps, self.shape.layers, self.shape.kv_heads
        self.row = torch.zeros(1, dtype=torch.long, device=self.device)
        self.mass = torch.zeros(steps, layers, self.shape.q_heads, len(ROLE), device=self.device)
        self.attended = torch.zeros(steps, layers, heads, dtype=torch.long, device=self.device)
        self.moved = torch.zeros(steps, 2, layers, heads, dtype=torch.long, device=self.device)

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.row, self.mass, self.attended, self.moved))

    # ------------------------------------------------------------------------------------------------------------- in the step
    def begin(self) -> None:
        self.moved.index_fill_(0, self.row, 0)

    def attention(self, layer: int, q: torch.Tensor, slots: Slots, bias: torch.Tensor, scaling: float) -> None:
        """One layer's attention: q [Hq, D], bias [H_kv, G, C]."""
        weights = attention_weights(q, slots.keys, bias, scaling)
        role = slots.role.long()
        by_role = weights.new_zeros(*weights.shape[:2], FREE + 1)
        by_role = by_role.scatter_add(-1, role[:, None].expand_as(weights), weights)[..., : len(ROLE)]
        self.mass[:, layer].index_copy_(0, self.row, by_role.flatten(0, 1)[None])
        seen = (bias > -torch.inf).any(1) & (role != ROLE["coarse"])
        self.attended[:, layer].index_copy_(0, self.row, seen.sum(-1)[None])

    def recalled(self, layer: int, moved: torch.Tensor, later: bool) -> None:
        """moved int64 [H_kv] tokens."""
        self.moved[:, int(later), layer].index_copy_(0, self.row, moved[None])

    def end(self) -> None:
        self.row.copy_((self.row + 1) % self.steps)

    # ------------------------------------------------------------------------------------------------------------ between steps
    def stepped(self) -> None:
        """The host knows that a step has been issued; a full ring is read."""
        self._waiting += 1
        if self._waiting == self.steps:
            self._flushed.append(self._rows())
            self._waiting = 0

    def _rows(self) -> tuple[np.ndarray, ...]:
        """Copies of the rows that have been written since the ring was last read."""
        return tuple(x[: self._waiting].numpy(force=True).copy() for x in (self.mass, self.attended, self.moved))

    def told(self) -> Told:
        """All steps so far, those still in the ring included."""
        return Told(*(np.concatenate(part) for part in zip(*self._flushed, self._rows(), strict=True)))
