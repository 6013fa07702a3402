"""What a model takes in memory before anything is loaded: its KV by its config, its weights by the headers of their
files. No torch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlens.files import RefusedFile, load_json
from kvlens.models.device import host_bytes
from kvlens.models.errors import UnsupportedModel
from kvlens.shape import KVShape
from kvlens.text.units import si_bytes

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


NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""bytes of a number in each format that a model may be loaded in"""


def check_dtype(dtype: str) -> None:
    """Raise UnsupportedModel for a number format that no model is loaded in."""
    if dtype not in NUMBER_BYTES:
        *most, last = NUMBER_BYTES
        raise UnsupportedModel(f"dtype '{dtype}' is not known: {', '.join(most)} or {last}.")


_STORED = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MOST_HEADER = 1 << 27
OTHER_FORMAT, OTHER_MODEL = "take --dtype bfloat16", "take a smaller model"
"""remedies for weights that need more than the free memory; pages offer no number format"""
WORTH_SAYING = 1 << 30
"""bytes of weights from which the number format is worth a sentence"""


class ModelBeyondMemory(UnsupportedModel):
    """The weights need more memory than this machine has free."""

    code = "model_beyond_memory"

    def __init__(self, name: str, dtype: str, needed: int, free: int, remedy: str) -> None:
        self.needed, self.free = needed, free
        super().__init__(
            f"the weights of '{name}' take {si_bytes(needed)} in {dtype}, and {si_bytes(free)} of memory are free: "
            f"{remedy}."
        )


@dataclass(frozen=True)
class Weights:
    """The tensors of a model's files."""

    numbers: int
    dtype: str
    """format of most numbers"""

    def bytes_in(self, dtype: str) -> int:
        """Bytes of the weights once they are loaded in a format."""
        return self.numbers * NUMBER_BYTES[dtype]


def weights_in(folder: Path) -> Weights | None:
    """Count the numbers in the safetensors files of a folder; None where there are none or a header cannot be read."""
    counts: Counter[str] = Counter()
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size)) if size <= _MOST_HEADER else {}
            for name, tensor in header.items():
                if name != "__metadata__":
                    counts[tensor["dtype"]] += math.prod(tensor["shape"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if not counts:
        return None
    stored = counts.most_common(1)[0][0]
    return Weights(sum(counts.values()), _STORED.get(stored, stored.lower()))


def check_memory(folder: Path, name: str, dtype: str) -> None:
    """Raise ModelBeyondMemory where the weights need more than the free memory of this machine in a format."""
    weights, free = weights_in(folder), host_bytes()
    if weights is None or free is None or (needed := weights.bytes_in(dtype)) <= free:
        return
    smaller = weights.bytes_in("bfloat16")
    remedy = OTHER_FORMAT if smaller < needed and smaller <= free else OTHER_MODEL
    raise ModelBeyondMemory(name, dtype, needed, free, remedy)


def dtype_sentence(folder: Path, dtype: str) -> str:
    """Return what the number format costs, where the files hold a smaller one and the weights are large; else ''."""
    weights = weights_in(folder)
    if weights is None or not {weights.dtype, dtype} <= NUMBER_BYTES.keys():
        return ""
    needed, stored = weights.bytes_in(dtype), weights.bytes_in(weights.dtype)
    if needed <= stored or needed < WORTH_SAYING:
        return ""
    return (
        f"The weights take {si_bytes(needed)} in {dtype}; the model's files hold them in {weights.dtype}: --dtype "
        f"{weights.dtype} takes {si_bytes(stored)}."
    )
