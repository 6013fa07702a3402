"""A Hugging Face decoder of the benchmark's shape with random weights, and a prompt whose keys and values are random:
no prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvlens.engine.models import LoadedModel
from kvlens.lab.gpu.part import Bench
from kvlens.methods.run_inputs import Peeked
from kvlens.text.prompts import Prompt, PromptText

if TYPE_CHECKING:  # it loads transformers
    from kvlens.engine.prefill import ReadPrompt

OBSERVED = 4096
"""last prompt queries that a method may ask for"""
SINKS, MARK = 4, 16
"""first tokens of the random text, and tokens from mark to mark after them"""


class Letters:
    """Stands where a tokenizer is needed only to show text."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "a"


def random_model(bench: Bench) -> LoadedModel:
    """transformers' Llama, bf16, on the device, switched to the kvlens attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvlens.engine.hf_attention import ATTENTION

    shape = bench.model
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        vocab_size=shape.vocabulary,
        num_hidden_layers=shape.kv.layers,
        num_attention_heads=shape.kv.q_heads,
        num_key_value_heads=shape.kv.kv_heads,
        head_dim=shape.kv.head_dim,
        max_position_embeddings=1 << 18,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(bench.device.at):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(previous)
    model.eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    return LoadedModel("random weights", model, Letters(), shape.kv, config.max_position_embeddings, True, frozenset())


def random_prompt(bench: Bench, context: int) -> tuple[Prompt, ReadPrompt]:
    """`context` tokens, of which all but the last are read. All layers show the same random keys and values until a
    method places them, so that a long prompt takes no more than a layer; every MARK tokens there is a mark."""
    from kvlens.engine.prefill import ReadPrompt, Surprisals

    kv, normal, n = bench.model.kv, bench.device.normal, context - 1
    ids = torch.randint(3, bench.model.vocabulary, (context,)).tolist()
    pieces = tuple("." if (i - SINKS + 1) % MARK == 0 else "a" for i in range(context))

    def of_layers(heads: int, tokens: int) -> torch.Tensor:
        return normal(1, heads, tokens, kv.head_dim).expand(kv.layers, -1, -1, -1)

    nats = torch.empty(context).exponential_()
    nats[0] = torch.nan
    peeked = Peeked(of_layers(kv.q_heads, 1), of_layers(kv.kv_heads, 1), of_layers(kv.kv_heads, 1))
    queries = of_layers(kv.q_heads, min(OBSERVED, n))
    surprisal = Surprisals.wrap(nats.to(bench.device.at))
    read = ReadPrompt(tuple(ids), of_layers(kv.kv_heads, n), of_layers(kv.kv_heads, n), queries, peeked, surprisal)
    return Prompt(PromptText("random"), tuple(ids), pieces, (None,) * context), read
