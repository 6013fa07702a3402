"""A method on random tensors: a session whose prompt no model has read, for comparing with formulas in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvlens import methods
from kvlens.engine.session import Session
from kvlens.holds import Hold
from kvlens.methods.base import Method
from kvlens.methods.run_inputs import Peeked, Rotate, RunContext, StepEnd
from kvlens.shape import KVShape
from kvlens.tiers.slots import FREE

SHAPE = KVShape(layers=2, q_heads=6, kv_heads=2, head_dim=24, itemsize=4)
"""three query heads per KV head, a head size that is no power of two"""


class Seen:
    """An observer that keeps what a session shows of each layer in the last step that it saw; by layer."""

    def __init__(self, session: Session) -> None:
        self.bias: dict[int, torch.Tensor] = {}
        self.selection: dict[int, Any] = {}
        self.decided: dict[int, tuple[torch.Tensor, Any]] = {}
        """bias and selection"""
        self.read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """position of each slot, and bias"""
        session.observer = self

    def layer(self, layer: int, q: torch.Tensor, biases: Any, scaling: float, selection: Any, slots: Any) -> None:
        """Take what the first part of the layer attended."""
        self.bias[layer], self.selection[layer] = biases[0], selection
        self.decided[layer] = biases[0], selection
        self.read[layer] = slots[0].position.clone(), biases[0]


class Trial:
    """Keys, values and queries of `n` prompt tokens, drawn; `kept` and `step` look at what the method made of them."""

    def __init__(
        self,
        method: str | type[Method],
        n: int,
        max_new: int,
        seed: int = 0,
        budget: int | None = None,
        rotate: Rotate | None = None,
        text: tuple[str, ...] = (),
        segments: tuple[tuple[str, int, int], ...] = (),
        holds: tuple[Hold, ...] = (),
        **params: Any,
    ) -> None:
        """method: a registered one's name, or a class; text: of each prompt token; segments: named parts."""
        rng = np.random.default_rng(seed)
        self.shape, self.n = SHAPE, n
        self.method = methods.get(method) if isinstance(method, str) else method
        self.rng = rng
        self.keys, self.values = rng.standard_normal((2, SHAPE.layers, SHAPE.kv_heads, n, SHAPE.head_dim))
        self.queries = rng.standard_normal((SHAPE.layers, SHAPE.q_heads, n, SHAPE.head_dim))
        self.last_q = rng.standard_normal((SHAPE.layers, SHAPE.q_heads, 1, SHAPE.head_dim))
        self.last_k = rng.standard_normal((SHAPE.layers, SHAPE.kv_heads, 1, SHAPE.head_dim))
        full = SHAPE.full_kv_bytes(n + max_new)
        context = RunContext(
            SHAPE, n, max_new, budget, full, 0, "random", torch.float32, torch.device("cpu"), tokens=text, rotate=rotate
        )
        context = replace(context, segments=segments)
        chosen = methods.make_parameters(self.method, None, params)
        self.session = Session(self.method, chosen, context, holds=holds)
        seen = self.queries[:, :, max(n - max(128, self.method.needs.queries), 0) :]
        peeked = Peeked(_t(self.last_q), _t(self.last_k), _t(self.last_k))
        received = _t(self.received()) if self.method.needs.received else None
        self.session.observed.adopt(_t(self.keys), _t(self.values), _t(seen), peeked, received)
        self.session.finish_prefill(torch.zeros(n))
        self.end: StepEnd | None = None
        self.outs: dict[int, torch.Tensor] = {}
        """of the last step, by layer: [1, Hq, 1, D]"""

    def weights(self, layer: int, head: int) -> np.ndarray:
        """Full causal attention of a query head over the prompt, float64 [n, n]."""
        scores = self.queries[layer, head] @ self.keys[layer, head // SHAPE.group].T / SHAPE.head_dim**0.5
        scores[np.triu_indices(self.n, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def received(self) -> np.ndarray:
        """Column sums of full attention, float64 [L, Hq, n]."""
        rows = [[self.weights(layer, head).sum(0) for head in range(SHAPE.q_heads)] for layer in range(SHAPE.layers)]
        return np.array(rows)

    def lies(self, layer: int, kv_head: int) -> list[int]:
        """Positions of the tokens on the device, ascending."""
        pool = self.session.memory.hot.pool(layer, kv_head)
        slots, at = pool.slots(layer), kv_head - pool.heads.start
        return sorted(slots.position[at][slots.role[at] != FREE].tolist())

    def attended(self, layer: int, head: int, bias: torch.Tensor | None) -> list[int]:
        """Positions that a query head reads through this bias, ascending."""
        slots, kv_head = self.session.memory.reads.slots(layer, bias), head // SHAPE.group
        seen = slots.role[kv_head] != FREE if bias is None else bias[kv_head, head % SHAPE.group] > -torch.inf
        return sorted(slots.position[kv_head][seen].tolist())

    def step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """One decode step with drawn tensors -> its queries [L, Hq, D] and the keys [L, H_kv, D] of its token."""
        self.session.begin_step(step, self.end)
        q = self.rng.standard_normal((SHAPE.layers, SHAPE.q_heads, SHAPE.head_dim))
        k = self.rng.standard_normal((SHAPE.layers, SHAPE.kv_heads, SHAPE.head_dim))
        for layer in range(SHAPE.layers):
            self.session.write(layer, _t(k[layer])[:, None], _t(k[layer])[:, None])
            self.outs[layer] = self.session.attend(layer, _t(q[layer])[None, :, None], SHAPE.head_dim**-0.5)
        self.end = StepEnd(step, self.n + step, 0.0, 0.0)
        return q, k


def _t(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.float32)
