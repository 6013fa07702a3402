"""Loading a decoder: the embedded demo model, a local path or a hub id; what is supported and why the rest is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlens.shape import KVShape

SUPPORTED = frozenset(
    [
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mistral",
        "ministral3",
        "mixtral",
        "phi",
        "phi3",
        "olmo2",
        "gemma",
        "glm4",
        "cohere",
        "granite",
        "smollm3",
        "starcoder2",
        "stablelm",
        "nemotron",
        "gpt_neox",
        "gpt2",
        "opt",
    ]
)
"""model_type of the families whose tokens were found equal to the stock model's under the kvlens attention."""
REFUSED = {
    "gemma2": "it caps attention scores (softcap) and mixes in sliding-window layers",
    "gemma3": "it mixes in sliding-window layers",
    "gemma3_text": "it mixes in sliding-window layers",
    "gpt_oss": "it has learned attention sinks and sliding-window layers",
    "exaone4": "it mixes in sliding-window layers",
    "deepseek_v2": "its cache holds latent vectors (MLA), not keys and values per head",
    "deepseek_v3": "its cache holds latent vectors (MLA), not keys and values per head",
    "falcon": "its attention bypasses transformers' attention interface",
    "bloom": "its attention bypasses transformers' attention interface",
    "t5": "it is an encoder-decoder",
    "bart": "it is an encoder-decoder",
    "mamba": "it has no KV cache",
    "mamba2": "it has no KV cache",
}


class UnsupportedModel(ValueError):
    """The model cannot be run, with the reason and what to do."""


@dataclass
class LoadedModel:
    """A frozen decoder with its tokenizer, switched to the kvlens attention."""

    name: str
    """as the user named it"""
    model: Any
    tokenizer: Any
    shape: KVShape
    max_positions: int
    plain_head: bool
    """logits are lm_head(hidden) with nothing after it, so they can be computed a few rows at a time"""
    eos: frozenset[int]

    @property
    def info(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "name": self.name,
            "architecture": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "layers": self.shape.layers,
            "q_heads": self.shape.q_heads,
            "kv_heads": self.shape.kv_heads,
            "head_dim": self.shape.head_dim,
            "vocabulary": config.vocab_size,
            "max_positions": self.max_positions,
        }


def resolve(name: str) -> str:
    """'demo' -> the embedded model's folder; a path -> itself; anything else is taken for a hub id.

    Raises UnsupportedModel for a folder that is missing, has no config or no safetensors.
    """
    if name == "demo":
        from kvlens.demo import demo_path

        return str(demo_path())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UnsupportedModel(f"'{name}' has no config.json: give the folder of a Hugging Face decoder.")
        if not any(path.glob("*.safetensors")):
            raise UnsupportedModel(
                f"'{name}' has no .safetensors weights: kvlens loads no pickled weights; convert the model first."
            )
        return str(path)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UnsupportedModel(f"'{name}' is not a model folder: give 'demo', a folder or a hub id like org/model.")
    return name


def check_supported(config: Any, name: str) -> None:
    """Raises UnsupportedModel with the reason, before any weights are read."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"'{name}' ({kind}) is not supported: it is an encoder-decoder; kvlens runs decoders.")
    if kind in REFUSED:
        raise UnsupportedModel(f"'{name}' ({kind}) is not supported: {REFUSED[kind]}.")
    if kind not in SUPPORTED:
        raise UnsupportedModel(
            f"'{name}' ({kind}) is not supported: this family has not been checked against its stock attention; "
            f"checked families: {', '.join(sorted(SUPPORTED))}."
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise UnsupportedModel(
            f"'{name}' ({kind}) is not supported: its config asks for a sliding window of {window} tokens."
        )


def shape_of(config: Any, itemsize: int) -> KVShape:
    """The KV sizes a transformers config announces."""
    q_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or q_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // q_heads
    return KVShape(config.num_hidden_layers, q_heads, kv_heads, head_dim, itemsize)


def load(name: str, device: str = "cpu", dtype: str = "float32") -> LoadedModel:
    """Load a decoder for kvlens. dtype: float32, bfloat16 or float16.

    Raises UnsupportedModel with one sentence for a model that cannot run. Never runs code that comes with a model,
    reads safetensors only, and asks the network only for a hub id that the user named.
    """
    source = resolve(name)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from kvlens.engine.hf_attention import ATTENTION

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedModel(
            f"device '{device}' was asked for, but this machine has no CUDA device; use --device cpu."
        )
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(f"dtype '{dtype}' is not known: float32, bfloat16 or float16.")
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        check_supported(config, name)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="sdpa",
        )
    except UnsupportedModel:
        raise
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedModel(f"model '{name}' could not be loaded: {first}") from error
    model.to(device).eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    config = model.config
    after_head = [getattr(config, key, None) for key in ("logit_scale", "logits_scaling", "final_logit_softcapping")]
    eos: Any = model.generation_config.eos_token_id if model.generation_config is not None else config.eos_token_id
    stops = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return LoadedModel(
        name,
        model,
        tokenizer,
        shape_of(config, torch.finfo(getattr(torch, dtype)).bits // 8),
        int(getattr(config, "max_position_embeddings", 0) or 1 << 30),
        all(v is None for v in after_head),
        frozenset(stops),
    )
