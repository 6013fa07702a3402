"""The sliding windows of a model's layers, by its config. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlens.models.errors import UnsupportedModel


def windows_of(config: Any) -> tuple[int, ...]:
    """Return the tokens of each layer's sliding window, 0 where a layer has none; () where no layer has one. config:
    transformers' config. Raises UnsupportedModel for a window that is no number of tokens."""
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return ()
    if type(window) is not int or window < 1:
        raise UnsupportedModel(f"a config has sliding_window = {repr(window)[:60]}, which is no number of tokens.")
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def windows_in(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the same by config.json, as far as it lists its layers: of a window without `layer_types` transformers'
    own class knows, and the first run counts it; () then."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if type(window) is not int or window < 1 or not isinstance(kinds, list) or len(kinds) != layers:
        return ()
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
