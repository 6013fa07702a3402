"""Is a model's folder whole? Asked before and after transformers loads it, which fills in what is missing with random
numbers and says nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlens.models.errors import UnsupportedModel

DERIVED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""endings of tensors that old files carry and every model computes anew"""


SIZES = {
    "num_hidden_layers": 256,
    "num_attention_heads": 256,
    "num_key_value_heads": 256,
    "hidden_size": 1 << 17,
    "vocab_size": 1 << 22,
}
"""sizes of a config, with the largest that kvlens accepts"""


def check_sizes(config: Mapping[str, Any], name: str) -> None:
    """Raises UnsupportedModel for a size of a config that no decoder can have."""
    for field, most in SIZES.items():
        value = config.get(field, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise UnsupportedModel(f"'{name}' is not a decoder that can run: its config says {field} = {value!r}.")


POSITIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta")
"""numbers of a config that must be finite and above 0"""


def check_numbers(config: Any, name: str) -> None:
    """Raise UnsupportedModel for a norm's epsilon or a RoPE base that is no positive finite number."""
    rope = getattr(config, "rope_parameters", None)
    values = {field: getattr(config, field, None) for field in POSITIVE}
    if isinstance(rope, dict) and rope.get("rope_theta") is not None:
        values["rope_theta"] = rope["rope_theta"]
    for field, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise UnsupportedModel(f"'{name}' is not a decoder that can run: its config has {field} = {value!r}.")


def check_config(config: Any, name: str) -> None:
    """Raises UnsupportedModel for numbers no decoder can have, a RoPE that is not known, and quantised weights."""
    check_numbers(config, name)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"'{name}' has quantised weights (quantization_config): give an unquantised model.")
    sizes: dict[str, Any] = {field: getattr(config, field, None) for field in SIZES}
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    check_sizes(sizes, name)
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise UnsupportedModel(
            f"'{name}' is not a decoder that can run: {sizes['num_attention_heads']} query heads cannot share "
            f"{sizes['num_key_value_heads']} KV heads."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if isinstance(rope, dict) and "rope_type" in rope and kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise UnsupportedModel(f"'{name}' asks for a RoPE of type '{kind}', which is not known.")


def check_files(folder: Path, name: str) -> None:
    """Raises UnsupportedModel for a config whose sizes transformers would stumble over, and naming the weights file
    that cannot be read, or that an index names and is not there."""
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"model '{name}' could not be loaded: its config.json ({first_line(error)}).") from None
    if not isinstance(config, dict):
        raise UnsupportedModel(f"model '{name}' could not be loaded: its config.json is not a JSON object.")
    check_sizes({field: value for field, value in config.items() if value is not None}, name)

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                if not list(file.keys()):
                    raise UnsupportedModel(f"'{name}': its weights file {path.name} holds no tensors.")
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(
                f"'{name}': its weights file {path.name} is damaged or cut short ({first_line(error)})."
            ) from None
    for index in folder.glob("*.safetensors.index.json"):
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise UnsupportedModel(f"'{name}': its {index.name} cannot be read.") from None
        for file_name in sorted(map(str, named)):
            if not (folder / file_name).is_file():
                raise UnsupportedModel(f"'{name}': its weights file {file_name} is missing.")


def check_loaded(model: Any, info: Any, name: str) -> None:
    """Raises UnsupportedModel naming weights that were missing, of another shape, without a place, or no numbers.
    info: transformers' loading info."""
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise UnsupportedModel(f"'{name}' is not whole: its files lack {_named(missing)}.")
    mismatched = sorted(info.get("mismatched_keys") or ())
    if mismatched:
        key, shape, expected_shape = mismatched[0]
        more = f" and {len(mismatched) - 1} more" if len(mismatched) > 1 else ""
        raise UnsupportedModel(
            f"'{name}': tensor {key}{more} has the shape {list(shape)}, its config asks for {list(expected_shape)}."
        )
    unexpected = sorted(key for key in info.get("unexpected_keys") or () if not key.endswith(DERIVED))
    if unexpected:
        raise UnsupportedModel(f"'{name}': its files have {_named(unexpected)} that its config has no place for.")
    if info.get("error_msgs"):
        raise UnsupportedModel(f"model '{name}' could not be loaded: {first_line(info['error_msgs'][0])}.")
    for key, weight in model.named_parameters():
        if weight.sum().isfinite():  # then so is every part, and this takes a third of the time
            continue
        low, high = weight.aminmax()  # a NaN anywhere is the result of both
        if not (low.isfinite() and high.isfinite()):
            raise UnsupportedModel(
                f"'{name}' is not whole: tensor {key} has values that are no numbers (NaN, infinite)."
            )


def check_vocabulary(tokenizer: Any, config: Any, name: str) -> None:
    """Raises UnsupportedModel where the tokenizer has tokens that the model has no embedding for. Padding may have
    none: nothing is padded here."""
    most = max(
        (token_id for token, token_id in tokenizer.get_vocab().items() if token != tokenizer.pad_token), default=-1
    )
    if most < 0:
        raise UnsupportedModel(f"'{name}': its tokenizer has no tokens.")
    if most >= config.vocab_size:
        raise UnsupportedModel(
            f"'{name}': its tokenizer has tokens up to number {most:,}, its model embeds {config.vocab_size:,}: they "
            "do not belong together."
        )


def first_line(error: Any) -> str:
    """The first line of a message, cut, without the point at its end: what libraries say goes on for pages."""
    line = next((part.strip() for part in str(error).splitlines() if part.strip()), type(error).__name__)
    return line.rstrip(" .:") if len(line) <= 200 else f"{line[:197]}..."


def _named(keys: list[str]) -> str:
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"the tensor {keys[0]}{more}"
