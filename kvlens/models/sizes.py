"""What a model's KV will take, by its config alone. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlens.models.errors import UnsupportedModel
from kvlens.shape import KVShape

SCALED = ("linear", "dynamic", "yarn")
"""RoPE types whose context is factor x the original one"""


@lru_cache(maxsize=8)
def sizes_in(source: Path, itemsize: int) -> tuple[KVShape, int]:
    """(KV sizes, in numbers of `itemsize` bytes; positions that the model takes) by config.json in the folder `source`.
    Raises UnsupportedModel where it names no layers, heads or hidden size."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    q_heads = text.get("num_attention_heads") or text.get("n_head")
    layers = text.get("num_hidden_layers") or text.get("n_layer")
    hidden = text.get("hidden_size") or text.get("n_embd")
    if not (q_heads and layers and hidden):
        raise UnsupportedModel(f"'{source}' has a config.json without layers, heads and hidden size.")
    head_dim = text.get("head_dim") or hidden // q_heads
    shape = KVShape(layers, q_heads, text.get("num_key_value_heads") or q_heads, head_dim, itemsize)
    return shape, context_length(text)


def context_length(config: Mapping[str, Any]) -> int:
    """Return the number of tokens that the positions of a config reach: its own limit, or factor x the original context
    of its RoPE scaling where that is more (the published recipes for linear, dynamic and YaRN scaling leave the limit
    as it was). 2^30 if the config names no limit."""
    limit = int(config.get("max_position_embeddings") or config.get("n_positions") or 1 << 30)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in SCALED or not isinstance(rope.get("factor"), int | float):
        return limit
    return max(limit, int(rope["factor"] * (rope.get("original_max_position_embeddings") or limit)))
