"""The attention gate of SeerAttention-R: which blocks of tokens a KV head's query heads will attend (arXiv 2506.08889,
sec. 2.2, eq. 1-3).

Shapes: L layers, H_kv KV heads, G query heads of a KV head, D head size, d' gate size, P blocks, p tokens of a block.
Queries and keys are those before the model's rotary embedding; the gate turns what it makes of them by its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlens.refusal import Refusal
from kvlens.shape import KVShape

BASE = 10_000.0
"""of the gate's rotary embedding"""
POOLS = 3
"""a block's keys are pooled by their largest, smallest and mean numbers"""


def gate_dim(head_dim: int) -> int:
    """Return d', a quarter of the head size, even (ours: the paper's gate is as wide as the head)."""
    return max(2, head_dim // 8 * 2)


@dataclass(frozen=True)
class Gate:
    """What SeerAttention-R learns, for one model and one block size."""

    query: Tensor
    """W_q [L, H_kv, G, D, d']: the group's query heads are joined in one gate query"""
    key: Tensor
    """W_k [L, H_kv, 3 D, d']"""

    def to(self, device: torch.device, dtype: torch.dtype) -> Gate:
        """Return the gate on a device, in a number format."""
        return Gate(self.query.to(device, dtype), self.key.to(device, dtype))


def gate_numbers(shape: KVShape) -> int:
    """Return the number of weights of a gate."""
    width = (shape.group + POOLS) * shape.head_dim * gate_dim(shape.head_dim)
    return shape.layers * shape.kv_heads * width


def draw_gate(shape: KVShape, seed: int) -> Gate:
    """Return a gate that nobody trained: weights drawn as training begins with them (Xavier, uniform), float32."""
    generator = torch.Generator().manual_seed(seed)
    dim, heads = gate_dim(shape.head_dim), (shape.layers, shape.kv_heads)

    def draw(*size: int) -> Tensor:
        reach = (6 / (size[-2] + size[-1])) ** 0.5
        return (torch.rand(*heads, *size, generator=generator) * 2 - 1) * reach

    return Gate(draw(shape.group, shape.head_dim, dim), draw(POOLS * shape.head_dim, dim))


def gate_from(tensors: dict[str, Any], name: str, shape: KVShape) -> Gate:
    """Return the gate of a file's tensors, float32. Raises Refusal (`other_model`) where they are of another model's
    sizes, KeyError where it has none."""
    gate = Gate(tensors["query"].float(), tensors["key"].float())
    dim, heads = gate_dim(shape.head_dim), (shape.layers, shape.kv_heads)
    sizes = (*heads, shape.group, shape.head_dim, dim), (*heads, POOLS * shape.head_dim, dim)
    if (tuple(gate.query.shape), tuple(gate.key.shape)) != sizes:
        raise Refusal(
            f"'{name}' does not have a gate for every KV head of every layer of this model: train one with "
            "`kvlens train seer`.",
            code="other_model",
            file=name,
        )
    return gate


def pool_blocks(keys: Tensor) -> Tensor:
    """Return the pooled keys of blocks: keys [..., P, p, D] before their rotary embedding -> [..., P, 3 D]."""
    return torch.cat((keys.amax(-2), keys.amin(-2), keys.mean(-2)), -1)


def turn(vectors: Tensor, positions: Tensor) -> Tensor:
    """Return vectors [..., m, d'] turned by the gate's rotary embedding at positions [m]."""
    half = vectors.shape[-1] // 2
    powers = torch.arange(half, device=vectors.device, dtype=vectors.dtype) / half
    angle = positions.to(vectors.dtype)[:, None] * BASE**-powers
    cos, sin = angle.cos(), angle.sin()
    low, high = vectors[..., :half], vectors[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def gate_keys(weight: Tensor, pooled: Tensor, starts: Tensor) -> Tensor:
    """Return the gate keys of blocks [..., P, d'] (eq. 2). weight [..., 3 D, d'], pooled [..., P, 3 D], starts [P]: the
    position of each block's first token."""
    return turn(pooled @ weight, starts)


def gate_queries(weight: Tensor, queries: Tensor, positions: Tensor) -> Tensor:
    """Return the gate queries [..., m, d'] (eq. 1). weight [..., G, D, d'], queries [..., G, m, D], positions [m]."""
    return turn((queries @ weight).sum(-3), positions)


def gate_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the logits of blocks [..., m, P], whose softmax is the gate's share of each block (eq. 3)."""
    return queries @ keys.mT * queries.shape[-1] ** -0.5
