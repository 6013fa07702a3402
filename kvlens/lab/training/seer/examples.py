"""What the gate of SeerAttention-R learns from: a document's queries, pooled keys and attention by blocks, read once
from the frozen model (arXiv 2506.08889, sec. 2.4).

Shapes: L layers, H_kv KV heads, G query heads of a KV head, D head size, n tokens, T queries, P blocks of p tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import LoadedModel
from kvlens.methods.seer.gate import pool_blocks
from kvlens.refusal import Refusal
from kvlens.text.prompts import Prompt, PromptText


@dataclass(frozen=True)
class Example:
    """One document. Queries and keys are those before the model's rotary embedding."""

    queries: Tensor
    """float16 [L, H_kv, G, T, D]"""
    positions: Tensor
    """of the queries, int64 [T]"""
    pooled: Tensor
    """float16 [L, H_kv, P, 3 D]"""
    shares: Tensor
    """float16 [L, H_kv, T, P]: a block's largest attention weight of the group, as a share of all blocks that were full
    before the query; 0 elsewhere"""
    bounds: Tensor
    """float16 [L, H_kv, T, P]: Quest's bound of each block, the largest of the group, to compare with"""

    def full(self, page: int) -> Tensor:
        """Return the blocks that were full before each query: bool [T, P]."""
        return torch.arange(self.pooled.shape[2]) < (self.positions // page)[:, None]


@torch.no_grad()
def read_example(
    loaded: LoadedModel, ids: Sequence[int], page: int, queries: int, rng: random.Random, least_blocks: int = 8
) -> Example:
    """Read a document once and return what the gate learns from it, at `queries` drawn positions with `least_blocks`
    full blocks before them. Raises Refusal for a model whose attention is more than scaled scores, or without rotary
    positions that can be taken back."""
    prompt = Prompt(PromptText("document"), tuple(ids), ("",) * len(ids), (None,) * len(ids))
    engine, shape = Engine(loaded), loaded.shape
    context = engine.context(prompt, None, Options(max_new=1))
    rotary = context.rotary("seer")
    if context.forms:
        raise Refusal(
            f"seer learns from plain attention, and '{loaded.name}' has windows, sinks or a cap in some layer.",
            code="attention_form",
            model=loaded.name,
        )
    read = engine.read(prompt, queries=len(ids))
    n = read.keys.shape[2]
    places = torch.tensor(sorted(rng.sample(range(least_blocks * page, n), min(queries, n - least_blocks * page))))
    query_rows, keys = read.last_queries[:, :, places].float(), read.keys.float()
    blocks = n // page
    whole = torch.arange(blocks * page)
    plain_keys = rotary(keys[:, :, : blocks * page], whole, back=True).unflatten(2, (blocks, page))
    paged = keys[:, :, : blocks * page].unflatten(2, (blocks, page))
    largest, smallest = paged.amax(3), paged.amin(3)
    hidden = torch.arange(n) > places[:, None]
    open_ = torch.arange(blocks) >= (places // page)[:, None]
    shares, bounds = [], []
    for layer in range(shape.layers):
        grouped = query_rows[layer].unflatten(0, (shape.kv_heads, shape.group))
        logits = grouped @ keys[layer, :, None].mT * shape.head_dim**-0.5
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        by_block = weights[..., : blocks * page].unflatten(-1, (blocks, page)).amax(-1).amax(1).masked_fill(open_, 0)
        shares.append((by_block / by_block.sum(-1, keepdim=True).clamp_min(1e-12)).half())
        high, low = largest[layer, :, None].mT, smallest[layer, :, None].mT
        bound = grouped.clamp(min=0) @ high + grouped.clamp(max=0) @ low
        bounds.append(bound.amax(1).half())
    plain_queries = rotary(query_rows, places, back=True).unflatten(1, (shape.kv_heads, shape.group))
    return Example(
        plain_queries.half(), places, pool_blocks(plain_keys).half(), torch.stack(shares), torch.stack(bounds)
    )
