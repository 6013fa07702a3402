"""What a model's KV will take, by its config alone. No torch."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from kvlens.models.errors import UnsupportedModel
from kvlens.shape import KVShape


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
    return shape, int(text.get("max_position_embeddings") or text.get("n_positions") or 1 << 30)
