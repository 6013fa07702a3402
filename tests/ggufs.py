"""Small GGUF files of the families that are converted, written with the gguf package as llama.cpp would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stock(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of transformers', fp32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family, **{**SIZES, "initializer_range": 0.2, "tie_word_embeddings": False, **changes}
    )
    return AutoModelForCausalLM.from_config(config).eval()


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's permutation of q and k: row i and row i + D/2 of a head come to stand side by side."""
    size = len(rows) // heads
    order = [
        head * size + half * (size // 2) + at for head in range(heads) for at in range(size // 2) for half in (0, 1)
    ]
    return rows[order]


def letters() -> list[str]:
    """A vocabulary of the 256 bytes, some pairs, and three control tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    single = sorted(ByteLevel.alphabet())
    return [*single, "12", "th", "he", "Ġt", *(f"<unused{at}>" for at in range(37)), "<|end|>", "<s>", "</s>"]


def write(
    path: Path,
    model: Any,
    family: str,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    kind: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """A model as GGUF. fields, tensors: more of them, or others in their place (None: left out); kind: how matrices are
    quantised."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    said: dict[str, Any] = {
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.key_length": config.head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{family}.rope.freq_base": 5000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": letters(),
        "tokenizer.ggml.token_type": [1] * 297 + [3, 3, 3],
        "tokenizer.ggml.merges": ["1 2", "t h", "h e", "Ġ t"],
        "tokenizer.ggml.eos_token_id": 299,
        **(fields or {}),
    }
    for key, value in said.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    found = {**named(model, family), **(tensors or {})}
    for name, values in found.items():
        if values is None:
            continue
        if kind is not None and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def named(model: Any, family: str) -> dict[str, np.ndarray]:
    """The model's weights under GGUF's names, Llama's q and k interleaved."""
    config, out = model.config, {}
    for key, tensor in model.state_dict().items():
        values, (stem, _, ending) = tensor.numpy(), key.rpartition(".")
        if stem in NAMES:
            out[f"{NAMES[stem]}.{ending}"] = values
            continue
        _, _, layer, rest = stem.split(".", 3)
        if family == "llama" and rest in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in rest else config.num_key_value_heads
            values = interleave(values, heads)
        out[f"blk.{layer}.{NAMES[rest]}.{ending}"] = values
    return out
