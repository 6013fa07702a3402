"""From a GGUF file to what transformers loads: config, and weights under their names, in their order of rows.

llama.cpp stores the rows of Llama's query and key projections interleaved for its own form of RoPE; here they are put
back (`unpermute`). Quantised weights become half precision; what the file has in float32, bfloat16 or float16 stays as
it is. Nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlens.models.errors import UnsupportedModel
from kvlens.models.ggufheader import Header, TensorEntry
from kvlens.models.ggufvocab import vocabulary_of
from kvlens.models.sizes import check_sizes
from kvlens.models.tensorfile import Entry

F32, F16, BF16 = 0, 1, 30
"""ggml's numbers of the types that are kept as they are"""
KEPT: dict[int, tuple[str, np.dtype[Any]]] = {
    F32: ("F32", np.dtype("<f4")),
    F16: ("F16", np.dtype("<f2")),
    BF16: ("BF16", np.dtype("<u2")),
}


@dataclass(frozen=True)
class Family:
    """How an architecture of GGUF is laid out. permuted: q and k are interleaved for llama.cpp's RoPE."""

    class_name: str
    permuted: bool


FAMILIES = {
    "llama": Family("LlamaForCausalLM", True),
    "qwen2": Family("Qwen2ForCausalLM", False),
    "qwen3": Family("Qwen3ForCausalLM", False),
}
"""GGUF's general.architecture -> family; Mistral's and SmolLM2's files say llama"""
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_FACTORS = (8.0, 32.0)
"""Llama 3.1's and 3.2's scaling of RoPE; a GGUF file has the factors per dimension instead"""


def family_of(header: Header, name: str) -> tuple[str, Family]:
    """Raises UnsupportedModel for an architecture that is not converted."""
    kind = str(header.need("general.architecture"))
    if kind not in FAMILIES:
        raise UnsupportedModel(
            f"'{name}' is a GGUF file of architecture '{kind}', which is not converted: {', '.join(FAMILIES)} are; "
            "give the model's folder of safetensors instead."
        )
    return kind, FAMILIES[kind]


def config_of(header: Header, name: str, path: Path) -> dict[str, Any]:
    """config.json of the model. Raises UnsupportedModel for what the file lacks or asks for and kvlens has not."""
    kind, family = family_of(header, name)

    def field_value(field: str) -> Any:
        return header.fields.get(f"{kind}.{field}")

    def number(field: str) -> int:
        value = header.need(f"{kind}.{field}")
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModel(f"'{name}': the field '{kind}.{field}' is {str(value)[:40]}, not a positive number.")
        return value

    def real(field: str, usual: float | None) -> float:
        value = field_value(field) or usual if usual is not None else header.need(f"{kind}.{field}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModel(f"'{name}': the field '{kind}.{field}' is {str(value)[:40]}, not a number.")
        return float(value)

    if field_value("expert_count"):
        raise UnsupportedModel(f"'{name}' has experts (MoE), which are not converted from GGUF.")
    if field_value("attention.sliding_window"):
        raise UnsupportedModel(f"'{name}' is not supported: it asks for a sliding window.")
    if field_value("rope.scaling.type") not in (None, "none"):
        raise UnsupportedModel(
            f"'{name}' scales RoPE ({field_value('rope.scaling.type')}), which is not converted from GGUF."
        )
    heads, width = number("attention.head_count"), number("embedding_length")
    kv_heads = number("attention.head_count_kv") if field_value("attention.head_count_kv") else heads
    head_dim = field_value("attention.key_length") or field_value("rope.dimension_count") or width // heads
    if field_value("rope.dimension_count") not in (None, head_dim):
        raise UnsupportedModel(f"'{name}' turns only a part of each head (partial RoPE), which is not converted.")
    vocabulary = len(vocabulary_of(header, name))
    eos = header.fields.get("tokenizer.ggml.eos_token_id")
    config = {
        "architectures": [family.class_name],
        "model_type": kind,
        "num_hidden_layers": number("block_count"),
        "hidden_size": width,
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": _rounded(real("attention.layer_norm_rms_epsilon", None)),
        "rope_parameters": _rope(header, path, real("rope.freq_base", 10000.0), head_dim, name),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "pad_token_id": header.fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float16",
    }
    check_sizes(config, name)
    return config


def plan_weights(header: Header, name: str) -> list[tuple[TensorEntry, Entry]]:
    """Every tensor with the name, dtype and shape it will have. Raises UnsupportedModel naming one that has no
    place."""
    planned = []
    for tensor in header.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue
        dtype = KEPT[tensor.kind][0] if tensor.kind in KEPT else "F16"
        planned.append((tensor, (_new_name(tensor.name, name), dtype, tensor.shape)))
    return planned


def values(header: Header, path: Path, name: str, planned: list[tuple[TensorEntry, Entry]]) -> Iterator[np.ndarray]:
    """The planned tensors one after the other. Raises UnsupportedModel naming one with values that are no numbers."""
    kind, family = family_of(header, name)
    heads = header.need(f"{kind}.attention.head_count")
    kv_heads = header.fields.get(f"{kind}.attention.head_count_kv") or heads
    data = np.memmap(path, np.uint8, "r")
    for tensor, (_, dtype, shape) in planned:
        results = _read(data, tensor)
        number = results if dtype != "BF16" else (results.astype(np.uint32) << 16).view(np.float32)
        if not np.isfinite(number).all():
            raise UnsupportedModel(f"'{name}' is not whole: tensor '{tensor.name}' has values that are no numbers.")
        if family.permuted and ".attn_q." in tensor.name:
            results = unpermute(results, heads)
        elif family.permuted and ".attn_k." in tensor.name:
            results = unpermute(results, kv_heads)
        yield results.reshape(shape)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k [heads x D, ...] in transformers' order: pairs (i, i + D/2) of a head stand side by side in
    GGUF."""
    if len(rows) % (2 * heads):
        raise UnsupportedModel(f"the GGUF file has {len(rows)} rows of queries or keys for {heads} heads.")
    split = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def _read(data: np.ndarray, tensor: TensorEntry) -> np.ndarray:
    raw = data[tensor.start : tensor.start + tensor.size]
    if tensor.kind in KEPT:
        return raw.view(KEPT[tensor.kind][1]).reshape(tensor.shape)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = raw.reshape(*tensor.shape[:-1], -1)
    try:
        full = dequantize(rows, GGMLQuantizationType(tensor.kind))
    except NotImplementedError:
        raise UnsupportedModel(f"tensor '{tensor.name}' has a storage type that cannot be read.") from None
    with np.errstate(over="ignore"):
        return full.astype(np.float16)


def _new_name(tensor: str, name: str) -> str:
    stem, _, ending = tensor.rpartition(".")
    parts = stem.split(".")
    if ending in ("weight", "bias"):
        if stem in WHOLE:
            return f"{WHOLE[stem]}.{ending}"
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in LAYER:
            return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{ending}"
    raise UnsupportedModel(f"'{name}' has a tensor '{tensor[:60]}' that has no place in its family.")


def _rope(header: Header, path: Path, base: float, head_dim: int, name: str) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": float(base)}
    if ROPE_FACTORS not in header.tensors:
        return plain
    stored = _read(np.memmap(path, np.uint8, "r"), header.tensors[ROPE_FACTORS]).astype(np.float64)
    for factor in LLAMA3_FACTORS:
        factors = llama3_factors(float(base), head_dim, factor)
        if stored.shape == factors.shape and np.allclose(stored, factors, rtol=1e-4):
            return {**plain, **LLAMA3, "factor": factor, "rope_type": "llama3"}
    raise UnsupportedModel(
        f"'{name}' scales RoPE by factors of its own, which are not converted from GGUF.",
        code="rope_factors",
        model=name,
    )


def llama3_factors(base: float, head_dim: int, factor: float) -> np.ndarray:
    """By how much Llama 3.1 divides each frequency of RoPE, float64 [D/2]: slow ones by `factor`, fast ones not, those
    between by a blend (transformers' rope type llama3)."""
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    frequency = base ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = frequency * LLAMA3["original_max_position_embeddings"] / (2 * np.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    scaled: np.ndarray = 1 / ((1 - blend) / factor + blend)
    return scaled


def _rounded(value: Any) -> float:
    """A float32 of the file as people wrote it: 9.99999974e-06 is 1e-05."""
    return float(np.format_float_positional(np.float32(value), unique=True)) if value else 0.0
