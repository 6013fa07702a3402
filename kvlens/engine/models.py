"""Loading a decoder that lies on this machine (kvlens.models says where); what is supported and why the rest is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvlens.collecting import uncollected
from kvlens.engine import modelfiles
from kvlens.models.convert import PROVENANCE
from kvlens.models.device import settle
from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import absent, find_model, resolve, stay_offline
from kvlens.models.sizes import check_dtype, check_memory, context_length, windows_of
from kvlens.shape import KVShape
from kvlens.text import chat

__all__ = ["SUPPORTED", "LoadedModel", "UnsupportedModel", "check_supported", "load", "resolve", "shape_of"]

MOST_STOPS = 1024  # tokens that a config may list as ends of a text
Told = Callable[[str, int, int], None]
"""what is being done ('convert'), done and total"""

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
        "gemma2",
        "gemma3_text",
        "glm4",
        "cohere",
        "cohere2",
        "granite",
        "smollm3",
        "starcoder2",
        "stablelm",
        "nemotron",
        "gpt_neox",
        "gpt_oss",
        "gpt2",
        "opt",
    ]
)
"""model_type of the families whose tokens were found equal to the stock model's under the kvlens attention."""
REFUSED = {
    "gemma3": "it reads images as well; kvlens runs the text models of Gemma 3 (gemma3_text)",
    "deepseek_v2": "its cache holds latent vectors (MLA), not keys and values per head",
    "deepseek_v3": "its cache holds latent vectors (MLA), not keys and values per head",
    "falcon": "its attention bypasses transformers' attention interface",
    "bloom": "its attention bypasses transformers' attention interface",
    "t5": "it is an encoder-decoder",
    "bart": "it is an encoder-decoder",
    "mamba": "it has no KV cache",
    "mamba2": "it has no KV cache",
}


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""what configurations call the number of experts"""


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
    """tokens that end an output: the configs' and the chat template's"""
    origin: str | None = None
    """kvlens.metaparts.OBJECT: a caller loaded the model and handed it in; None: kvlens loaded it by its name"""

    def decode(self, ids: Sequence[int]) -> str:
        """The output that these tokens are, as a run's meta has it."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def fingerprint(self) -> str:
        """Return which model was loaded, as a run's meta has it."""
        return modelfiles.fingerprint(self.model, self.name, self.origin)

    @property
    def info(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "name": self.name,
            "architecture": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "step_parameters": step_parameters(self.model),
            "layers": self.shape.layers,
            "q_heads": self.shape.q_heads,
            "kv_heads": self.shape.kv_heads,
            "head_dim": self.shape.head_dim,
            "vocabulary": config.vocab_size,
            "max_positions": self.max_positions,
            **({} if self.origin is None else {"origin": self.origin}),
        }


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


def stock_attention(config: Any) -> str:
    """Return transformers' name of the attention that a stock model of this config runs with on a CPU: PyTorch's own
    has no cap on scores and no sink logits."""
    return "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"


def shape_of(config: Any, itemsize: int) -> KVShape:
    """The KV sizes a transformers config announces."""
    q_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or q_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // q_heads
    return KVShape(config.num_hidden_layers, q_heads, kv_heads, head_dim, itemsize, windows_of(config))


@uncollected()
def step_parameters(model: Any) -> int | None:
    """Return how many weights a decode step reads: all but an embedding table that is not the output's too. None for a
    mixture of experts, whose steps read some of them."""
    if any(getattr(model.config, name, None) for name in EXPERTS):
        return None
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = output is not None and output.weight is embedding
    return sum(weight.numel() for weight in model.parameters()) - (0 if tied else embedding.numel())


def load(
    name: str, device: str = "cpu", dtype: str = "float32", told: Told = lambda what, done, total: None
) -> LoadedModel:
    """Load a decoder for kvlens. device: auto (CUDA where there is one), cpu or cuda[:N]; dtype: float32, bfloat16 or
    float16. told(what, done, total): how far the first use of a GGUF file is.

    Raises UnsupportedModel with one sentence for a model that cannot run or is not whole. Never runs code that comes
    with a model, reads safetensors and GGUF only, and asks the network for nothing.
    """
    stay_offline()
    if (device, dtype) == ("cpu", "float32") and (cached := find_model(name)) is not None:
        return cast(LoadedModel, cached)
    source = resolve(name, told)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import logging

    from kvlens.engine.hf_attention import ATTENTION
    from kvlens.shortage import shortage

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    place = settle(device)
    check_dtype(dtype)
    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        if Path(source).is_dir():
            modelfiles.check_files(Path(source), name)
            check_memory(Path(source), name, dtype)
        config = AutoConfig.from_pretrained(source, **safe)
        check_supported(config, name)
        modelfiles.check_config(config, name)
        # AutoTokenizer takes the family's own class, which would put its split in place of the one the file has.
        converted = (Path(source) / PROVENANCE).is_file()
        tokenizer = (PreTrainedTokenizerFast if converted else AutoTokenizer).from_pretrained(source, **safe)
        modelfiles.check_vocabulary(tokenizer, config, name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            attn_implementation=stock_attention(config),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **safe,
        )
        model, info = loaded
        modelfiles.check_loaded(model, info, name)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever a stranger's files make transformers raise
        if shortage(error, "load") is not None:
            raise
        if isinstance(error, OSError) and not Path(source).is_dir():
            raise UnsupportedModel(absent(name)) from error
        raise UnsupportedModel(f"model '{name}' could not be loaded: {modelfiles.first_line(error)}.") from error
    model.to(place).eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    return describe_model(name, model, tokenizer)


def describe_model(name: str, model: Any, tokenizer: Any, origin: str | None = None) -> LoadedModel:
    """Return a checked transformers decoder and its tokenizer with the sizes that a run needs."""
    import torch

    config = model.config
    after_head = [getattr(config, key, None) for key in ("logit_scale", "logits_scaling", "final_logit_softcapping")]
    return LoadedModel(
        name,
        model,
        tokenizer,
        shape_of(config, torch.finfo(model.dtype).bits // 8),
        context_length(config.to_dict()),
        all(v is None for v in after_head),
        stop_ids(model.generation_config, config) | chat.stop_ids(tokenizer),
        origin,
    )


def stop_ids(*configs: Any) -> frozenset[int]:
    """Return every token that a config says ends a text. Raises UnsupportedModel for what names no tokens."""
    tokens: set[int] = set()
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        listed = [] if ids is None else list(ids) if isinstance(ids, list | tuple) else [ids]
        if len(listed) > MOST_STOPS or any(type(token) is not int for token in listed):
            raise UnsupportedModel(
                f"a config has eos_token_id = {repr(ids)[:60]}, which names no tokens: mend the file."
            )
        tokens.update(listed)
    return frozenset(tokens)
