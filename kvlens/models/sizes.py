"""What a model's KV will take, by its config alone. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlens.files import RefusedFile, load_json
from kvlens.models.errors import UnsupportedModel
from kvlens.models.windows import windows_in
from kvlens.shape import KVShape

SIZES = {
    "num_hidden_layers": 256,
    "n_layer": 256,
    "num_attention_heads": 256,
    "n_head": 256,
    "num_key_value_heads": 256,
    "hidden_size": 1 << 17,
    "n_embd": 1 << 17,
    "head_dim": 1 << 12,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 31,
    "n_positions": 1 << 31,
}
"""sizes of a config, with the largest that kvlens accepts"""
SCALED = ("linear", "dynamic", "yarn")
"""RoPE types whose context is factor x the original one"""


@lru_cache(maxsize=8)
def sizes_in(source: Path, itemsize: int) -> tuple[KVShape, int]:
    """(KV sizes, in numbers of `itemsize` bytes; positions that the model takes) by config.json in the folder `source`.
    Raises UnsupportedModel where it names no layers, heads or hidden size."""
    config = read_config(source)
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise UnsupportedModel(f"'{source}' has a config.json whose text_config is no JSON object.")
    check_sizes(text, str(source))
    q_heads = text.get("num_attention_heads") or text.get("n_head")
    layers = text.get("num_hidden_layers") or text.get("n_layer")
    hidden = text.get("hidden_size") or text.get("n_embd")
    if not (q_heads and layers and hidden):
        raise UnsupportedModel(f"'{source}' has a config.json without layers, heads and hidden size.")
    head_dim = text.get("head_dim") or hidden // q_heads
    shape = KVShape(
        layers, q_heads, text.get("num_key_value_heads") or q_heads, head_dim, itemsize, windows_in(text, layers)
    )
    return shape, context_length(text)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a model's folder, its sizes within bounds. Raises UnsupportedModel."""
    try:
        config = load_json(folder / "config.json")
    except (OSError, RefusedFile) as error:
        raise UnsupportedModel(f"model '{folder}' could not be loaded: its config.json ({error}).") from None
    if not isinstance(config, dict):
        raise UnsupportedModel(f"model '{folder}' could not be loaded: its config.json is not a JSON object.")
    check_sizes(config, str(folder))
    return config


def check_sizes(config: Mapping[str, Any], name: str) -> None:
    """Raise UnsupportedModel for a size of a config that no decoder can have. None: not given."""
    for field, most in SIZES.items():
        value = config.get(field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most):
            raise UnsupportedModel(
                f"'{name}' is not a decoder that can run: its config says {field} = {repr(value)[:60]}, a whole number "
                f"from 1 to {most:,} is needed."
            )


def context_length(config: Mapping[str, Any]) -> int:
    """Return the number of tokens that the positions of a config reach: its own limit, or factor x the original context
    of its RoPE scaling where that is more (the published recipes for linear, dynamic and YaRN scaling leave the limit
    as it was). 2^30 if the config names no limit."""
    limit = int(config.get("max_position_embeddings") or config.get("n_positions") or 1 << 30)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return limit
    kind = rope.get("rope_type", rope.get("type"))
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or limit
    if kind not in SCALED or not isinstance(factor, int | float) or not isinstance(original, int | float):
        return limit
    reach = factor * original
    return max(limit, int(reach)) if math.isfinite(reach) else limit
