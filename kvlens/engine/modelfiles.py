"""The files of a model: whether they are whole, asked before and after transformers loads them, which fills in what is
missing with random numbers and says nothing; and their hash, by which a changed file of the same name is noticed."""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlens.files import MOST_JSON, RefusedFile, check_ordinary, load_json
from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import located, ready, resolve
from kvlens.models.sizes import check_sizes, read_config

TEXTS = (".json", ".jinja", ".txt", ".model")
"""files of a model's folder that are read whole"""
_FREE_NUMBERS = 1 << 24
"""are made room for without a look at the weights files"""
DERIVED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""endings of tensors that old files carry and every model computes anew"""
POSITIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta")
"""numbers of a config that must be finite and above 0"""
_DECIDING = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""files beside the weights that decide what a model computes"""


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
    needed = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size")
    sizes: dict[str, Any] = {field: getattr(config, field, None) for field in needed}
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    check_sizes({field: 0 if value is None else value for field, value in sizes.items()}, name)
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


def check_room(config: Mapping[str, Any], folder: Path, name: str) -> None:
    """Raise UnsupportedModel for a config that asks for more numbers than the weights files have bytes: transformers
    would make room for them."""
    hidden = config.get("hidden_size") or config.get("n_embd") or 1
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 1
    experts = any("expert" in field for field in config)  # their configs name sizes that no layer has
    inner = 0 if experts else config.get("intermediate_size") or 0
    needed = hidden * ((config.get("vocab_size") or 1) + layers * (hidden + inner))  # some of a layer's matrices
    held = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if needed > max(held, _FREE_NUMBERS):
        raise UnsupportedModel(
            f"'{name}' is not whole: its config asks for {needed:,} numbers or more, its weights files have "
            f"{held:,} bytes."
        )


def check_files(folder: Path, name: str) -> None:
    """Raises UnsupportedModel for a config whose sizes transformers would stumble over, and naming the weights file
    that cannot be read, or that an index names and is not there."""
    from safetensors import SafetensorError, safe_open

    try:
        for path in folder.iterdir():
            if not path.is_dir():
                check_ordinary(path, MOST_JSON if path.suffix in TEXTS else None)
    except (OSError, RefusedFile) as error:
        raise UnsupportedModel(f"model '{name}' could not be loaded: {first_line(error)}.") from None
    check_room(read_config(folder), folder, name)
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
            named = set(load_json(index)["weight_map"].values())
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
                f"'{name}' is not whole: tensor {key} has values that are no numbers (NaN, infinite).",
                code="not_finite",
                tensor=key,
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


def ahead(name: str) -> threading.Thread:
    """Hash the files of a model that lies ready in a folder, on another thread, while libraries are imported.
    `fingerprint` then finds the hashes. A hub model is known by its revision, so nothing of it is hashed. What is wrong
    with a file is left to those who load it."""

    def work() -> None:
        with contextlib.suppress(UnsupportedModel, OSError):
            folder = None if located(name) is None else ready(name)
            if folder is not None:
                _of_folder(folder)

    thread = threading.Thread(target=work, name="kvlens-fingerprint", daemon=True)
    thread.start()
    return thread


def fingerprint(model: Any, name: str, origin: str | None) -> str:
    """Return 'sha256:...' over the weights, the config and the tokenizer's files of a folder; 'ORG/MODEL@revision' of a
    hub model; a hash of the weights in memory of a model object, and where there is neither."""
    from kvlens.metaparts import OBJECT  # brings pydantic, which a machine that only measures kernels lacks

    if origin == OBJECT:
        return _in_memory(model)
    try:
        folder = Path(resolve(name))
    except UnsupportedModel:
        return _in_memory(model)
    if folder.is_dir():
        return _of_folder(folder)
    revision = getattr(model.config, "_commit_hash", None)
    return f"{name}@{revision}" if revision else _in_memory(model)


def file_stamp(name: str) -> str:
    """Return a hash of the names, sizes and times of a model's files, without reading them; '' for a model whose files
    are not in a folder."""
    try:
        folder = ready(name)
    except UnsupportedModel:
        return ""
    return "" if folder is None else hashlib.sha256(repr(_files_of(folder)).encode()).hexdigest()[:32]


def _of_folder(folder: Path) -> str:
    return _of_files(_files_of(folder))


def _files_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return (path, bytes, time of change) of the files that decide what a model computes."""
    files = [*sorted(folder.glob("*.safetensors")), *(folder / name for name in _DECIDING if (folder / name).is_file())]
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)


@lru_cache(maxsize=8)
def _of_files(files: tuple[tuple[str, int, int], ...]) -> str:
    """`files`: (path, bytes, time of change); the last two only make a changed file another entry of the cache."""
    whole = hashlib.sha256()
    for path, _, _ in files:
        with open(path, "rb") as file:
            whole.update(Path(path).name.encode() + hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{whole.hexdigest()}"


def _in_memory(model: Any) -> str:
    import torch

    whole = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        whole.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"sha256:{whole.hexdigest()}"
