"""A FreeKV session driven by hand, for its tests."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from kvlens.engine.session import Session
from kvlens.methods.freekv.method import FreeKV
from kvlens.methods.freekv.params import FreeKVParameters
from kvlens.methods.run_inputs import RunContext, StepEnd
from kvlens.shape import KVShape

SHAPE = KVShape(layers=3, q_heads=4, kv_heads=2, head_dim=8, itemsize=4)
PARAMS = FreeKVParameters(tokens=29, sinks=3, window=8, page=6, tau=0.6, dense_layers=1)
"""three selected pages of six tokens"""


class Trial:
    """A session driven by hand with its own record of all keys and values; watches what every layer did."""

    def __init__(
        self,
        params: FreeKVParameters,
        n: int,
        shape: KVShape = SHAPE,
        budget: int | None = None,
        max_new: int = 30,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.rng, self.shape, self.n, self.params = rng, shape, n, params
        context = RunContext(
            shape,
            n,
            max_new,
            budget,
            shape.full_kv_bytes(n + max_new),
            seed,
            "tiny",
            torch.float32,
            torch.device("cpu"),
        )
        self.session = Session(FreeKV, params, context)
        self.keys, self.values = rng.standard_normal((2, shape.layers, shape.kv_heads, n, shape.head_dim))
        self.q = rng.standard_normal((shape.layers, shape.q_heads, shape.head_dim))
        self.seen: dict[int, tuple] = {}

    def layer(
        self,
        layer: int,
        q: torch.Tensor,
        biases: list[torch.Tensor | None],
        scaling: float,
        selection: object,
        slots: Any,
    ) -> None:
        """The session's observer: keeps the selection and which positions each KV head attended."""
        (bias,) = biases
        (slots,) = slots
        seen = torch.ones_like(slots.role, dtype=torch.bool) if bias is None else (bias > -math.inf).all(1)
        if bias is not None:
            assert torch.equal(seen, (bias > -math.inf).any(1)), "all query heads of a group read the same"
        positions = [
            sorted(slots.position[head, : seen.shape[1]][seen[head]].tolist()) for head in range(self.shape.kv_heads)
        ]
        self.seen[layer] = selection, positions

    def prefill(self) -> Trial:
        for layer in range(self.shape.layers):
            self.session.write(layer, tensor(self.keys[layer]), tensor(self.values[layer]))
            self.session.attend(
                layer, torch.zeros(1, self.shape.q_heads, self.n, self.shape.head_dim), self.shape.head_dim**-0.5
            )
        self.session.finish_prefill(torch.full((self.n,), 1.0))
        self.session.observer = self
        return self

    def step(self, step: int, q: np.ndarray | None = None, k: np.ndarray | None = None) -> torch.Tensor:
        """One decode step -> outputs [L, Hq, D]; sets q, k, v. Without a query: near the last one, or not, per head."""
        shape, rng = self.shape, self.rng
        end = StepEnd(step - 1, self.n + step - 1, 1.0, 1.0) if step else None
        self.session.begin_step(step, end)
        self.k, self.v = rng.standard_normal((2, shape.layers, shape.kv_heads, shape.head_dim))
        if k is not None:
            self.k = k
        near = rng.uniform(0.2, 1, (shape.layers, shape.q_heads, 1)) if q is None else 0
        self.q = near * self.q + (1 - near) * rng.standard_normal(self.q.shape) if q is None else q
        out = []
        for layer in range(shape.layers):
            self.session.write(layer, tensor(self.k[layer])[:, None], tensor(self.v[layer])[:, None])
            out.append(self.session.attend(layer, tensor(self.q[layer])[None, :, None], shape.head_dim**-0.5)[0, :, 0])
        return torch.stack(out)

    def moved(self, layer: int, blocking: bool) -> list[list[int]]:
        """Pages brought to the device since the step began, per KV head, in order."""
        pages: list[list[int]] = [[] for _ in range(self.shape.kv_heads)]
        for entry in self.session.memory.transfers.opened:
            if entry.direction == "h2d" and entry.blocking == blocking:
                for _, kv_head, span, size in (line for line in entry.lines() if line[0] == layer):
                    pages[kv_head].append(span - self.first_id)
                    assert size == self.params.page * self.shape.head_token_bytes
        return pages

    @property
    def first_id(self) -> int:
        return 1 + (self.params.sinks > 0)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)
