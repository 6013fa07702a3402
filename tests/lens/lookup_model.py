"""A decoder made by hand in which chosen KV heads, and no others, carry a fact from where it stands to where it is
asked for.

Words (one token each): f0..f19 fill; kKvV is a fact, 'the value of key K is V'; qK asks for key K; aV is the answer V;
'.' ends the text. The residual stream (64 numbers) is divided by what may stand in it, every direction its own unit
vector:

    filler 0..19 | key of a fact 20..23 | its value 24..31 | asked key 32..35 | answer said before 36..43 | answer to
    say 44..51

An embedding has norm 1: f_j = filler j; kKvV = (key K + value V) / sqrt 2; qK = asked K; aV = said V.
A carrier head turns the asked key into a query and the fact's key into a key, in the slow RoPE pairs, so that distance
does not matter, and writes the fact's value into 'answer to say'. All other heads are random, but their values read
filler only and they write filler only: whatever they attend, nothing of a fact passes through them. The feed-forward
layers write nothing. The head of the model says aV by 'answer to say V', '.' after any answer, and f0 where a key was
asked and nothing better is known; `doubt` is how loudly it says that. With one carrier of full strength a fact is
louder than the doubt; with two of half strength only both are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FILLERS, KEYS, VALUES = 20, 4, 8
WORDS = [
    ".",
    *(f"f{i}" for i in range(FILLERS)),
    *(f"k{k}v{v}" for k in range(KEYS) for v in range(VALUES)),
    *(f"q{k}" for k in range(KEYS)),
    *(f"a{v}" for v in range(VALUES)),
]
ID = {word: i for i, word in enumerate(WORDS)}
FILLER, KEY, VALUE, ASKED, SAID, ANSWER = 0, 20, 24, 32, 36, 44
WIDTH, HEADS, KV_HEADS, SIZE, LAYERS = 64, 4, 2, 16, 2
SLOW = 4
"""first slow RoPE pair: with theta 1e16 it turns by 1e-8 per token"""
SHARP = 2.0


@torch.no_grad()
def build(carriers: tuple[tuple[int, int], ...], strength: float, doubt: float) -> Any:
    """LlamaForCausalLM of 2 layers, 4 query heads, 2 KV heads; carriers: (layer, KV head)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=WIDTH,
            intermediate_size=8,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=SIZE,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e16},
            bos_token_id=None,
            eos_token_id=ID["."],
            pad_token_id=None,
        )
    )
    one = torch.eye(WIDTH)
    rows = model.model.embed_tokens.weight.zero_()
    rows[ID["."]] = one[FILLER]
    for i in range(FILLERS):
        rows[ID[f"f{i}"]] = one[FILLER + i]
    for k in range(KEYS):
        rows[ID[f"q{k}"]] = one[ASKED + k]
        for v in range(VALUES):
            rows[ID[f"k{k}v{v}"]] = (one[KEY + k] + one[VALUE + v]) / 2**0.5
    for v in range(VALUES):
        rows[ID[f"a{v}"]] = one[SAID + v]
    for index, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.weight.zero_()
        for kv_head in range(KV_HEADS):
            carries = (index, kv_head) in carriers
            _set_head(layer.self_attn, kv_head, strength if carries else None)
    out = model.lm_head.weight.zero_()
    out[ID["f0"], ASKED : ASKED + KEYS] = doubt
    for v in range(VALUES):
        out[ID[f"a{v}"], ANSWER + v] = 1.0
    out[ID["."], SAID : SAID + VALUES] = 2.0
    return model


def _set_head(attention: Any, kv_head: int, strength: float | None) -> None:
    """strength: of a carrier, None for a head that carries nothing. Of a carrier's two query heads the first looks
    up."""
    q, k, v, o = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.o_proj.weight)
    own, group = slice(kv_head * SIZE, (kv_head + 1) * SIZE), HEADS // KV_HEADS
    first = slice(group * kv_head * SIZE, (group * kv_head + 1) * SIZE)
    everyone = slice(group * kv_head * SIZE, group * (kv_head + 1) * SIZE)
    for weight, where in ((q, everyone), (k, own)):
        weight[where] = torch.randn(weight[where].shape) * 0.3
    v[own] = 0.0
    v[own, FILLER : FILLER + FILLERS] = torch.randn(SIZE, FILLERS) * 0.3
    o[:, everyone] = 0.0
    o[FILLER : FILLER + FILLERS, everyone] = torch.randn(FILLERS, group * SIZE) * 0.02
    if strength is None:
        return
    q[first], k[own], v[own] = 0.0, 0.0, 0.0
    o[:, everyone] = 0.0
    for key in range(KEYS):
        q[first][SLOW + key, ASKED + key] = SHARP
        k[own][SLOW + key, KEY + key] = SHARP
    for value in range(VALUES):
        v[own][value, VALUE + value] = 1.0
        o[ANSWER + value, first.start + value] = strength


def save(folder: Path, carriers: tuple[tuple[int, int], ...], strength: float, doubt: float) -> Path:
    """The model with a tokenizer of whole words, as `kvlens run --model FOLDER` takes it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel(ID, unk_token="."))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=".").save_pretrained(folder)
    build(carriers, strength, doubt).save_pretrained(folder)
    return folder


def text(tokens: int, fact_at: int, seed: int = 0) -> str:
    """A prompt that asks for key 2, whose value 5 stands at token `fact_at`; facts of other keys stand near its end."""
    generator = torch.Generator().manual_seed(seed)
    words = [f"f{1 + int(i)}" for i in torch.randint(FILLERS - 1, (tokens,), generator=generator)]
    words[fact_at], words[tokens - 20], words[tokens - 10], words[-1] = "k2v5", "k0v1", "k1v3", "q2"
    return " ".join(words)
