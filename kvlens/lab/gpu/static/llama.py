"""A Llama's decode step in few launches: the modules' own weights, and five kernels a layer beside the attention.

The modules of transformers issue some thirty small operations a layer around their products. Here norms, rotary
embedding, the write of the token, SiLU and residual sums are computed by the kernels of the products
(kvlens/lab/gpu/kernels). Shapes: B sequences, Hq query heads, H KV heads, D head size, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvlens.lab.gpu.kernels.matvec import Around, matvec


class Attention(Protocol):
    """What a session, or the sessions of a batch, do for the step."""

    def turn_and_write(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Write the tokens' turned keys and their values: qkv [B, (Hq + 2 H) D], cos, sin [B, D] -> turned queries [B,
        Hq, D]."""

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [B, Hq, 1, D] -> attention output of the same shape."""


def refusal(model: Any) -> str | None:
    """Return why the model has no fused step; None: it has one."""
    config = model.config
    if type(model).__name__ != "LlamaForCausalLM":
        return f"a {type(model).__name__} is not computed as Llama is"
    if config.hidden_act != "silu" or config.attention_bias or config.mlp_bias:
        return "its layers have biases, or another gate than SiLU"
    return None


@dataclass(frozen=True)
class _Layer:
    """Weights of a layer: queries, keys and values as one matrix, gates and ups as one."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    before_attention: torch.Tensor
    before_mlp: torch.Tensor


class FusedLlama:
    """The step of a LlamaForCausalLM. Matrices that are read together are put together in memory, and the modules' own
    weights become views of them, so nothing is held twice."""

    def __init__(self, model: Any) -> None:
        """Raises ValueError for a model that is computed in another way."""
        reason = refusal(model)
        if reason is not None:
            raise ValueError(f"The fused step is Llama's: {reason}.")
        self._model, self._inner = model, model.model
        config = model.config
        self._epsilon = float(config.rms_norm_eps)
        self._heads = int(config.num_attention_heads)
        self._layers = [self._join(layer) for layer in self._inner.layers]
        self._scaling = [float(layer.self_attn.scaling) for layer in self._inner.layers]

    def _join(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return _Layer(
            joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            attention.o_proj.weight,
            joined([mlp.gate_proj, mlp.up_proj]),
            mlp.down_proj.weight,
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
        )

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """tokens, positions int64 [B, 1] -> logits [B, V]."""
        inner, epsilon = self._inner, self._epsilon
        hidden = inner.embed_tokens(tokens)
        cos, sin = (turn[:, 0] for turn in inner.rotary_emb(hidden, positions))
        cos, sin = cos.expand(len(tokens), -1), sin.expand(len(tokens), -1)
        hidden = hidden[:, 0]
        for number, layer in enumerate(self._layers):
            qkv = matvec(hidden, layer.qkv, Around(layer.before_attention, epsilon))
            q = attention.turn_and_write(number, qkv, cos, sin)
            read = attention.attend(number, q[:, :, None], self._scaling[number])
            hidden = matvec(read.reshape(len(tokens), -1), layer.out, Around(add=hidden))
            gated = matvec(hidden, layer.gate_up, Around(layer.before_mlp, epsilon, gated=True))
            hidden = matvec(gated, layer.down, Around(add=hidden))
        return matvec(hidden, self._model.lm_head.weight, Around(inner.norm.weight, epsilon))


def joined(modules: Sequence[Any]) -> torch.Tensor:
    """Return the weights [N_i, K] of linear modules as one matrix [sum of N_i, K], of which they are views from now
    on."""
    weights = [module.weight.detach() for module in modules]
    start, end = weights[0], weights[0].data_ptr()
    for weight in weights:
        if weight.data_ptr() != end or weight.untyped_storage().data_ptr() != start.untyped_storage().data_ptr():
            break
        end += weight.nbytes
    else:
        return start.as_strided((sum(map(len, weights)), start.shape[1]), (start.shape[1], 1))
    whole = torch.cat(weights)
    for module, part in zip(modules, whole.split(list(map(len, weights))), strict=True):
        module.weight = torch.nn.Parameter(part, requires_grad=False)
    return whole
