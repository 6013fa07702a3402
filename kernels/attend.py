"""Attention of one decode step over a pool of slots. Tensors only.

Shapes: Hq query heads, H_kv KV heads, G = Hq / H_kv, C slots, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kvlens.kernels import pool_attend
from kvlens.kernels.choice import Backend, backend
from kvlens.kernels.pool_attend import Live


@dataclass(frozen=True)
class LayerForm:
    """What a layer's attention has besides scaled scores."""

    window: int = 0
    """a query attends so many newest tokens, its own included; 0: all"""
    softcap: float = 0.0
    """scores s become softcap * tanh(s / softcap) (Gemma 2); 0: as they are"""
    sinks: torch.Tensor | None = None
    """[Hq]: logits that take a share of the softmax and have no key (gpt-oss); None: none"""

    def cap(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scaled scores as the softmax takes them."""
        return scores if not self.softcap else torch.tanh(scores / self.softcap) * self.softcap

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the softmax of capped scores [H_kv, G, ..., n]. The rest up to 1 is the sink logit's share."""
        return self.shares(scores)[0]

    def shares(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the softmax of capped scores [H_kv, G, ..., n], and the sink logit's share [H_kv, G, ...]; None: there
        is no such logit."""
        if self.sinks is None:
            return scores.softmax(-1), None
        groups = self.sinks.to(scores).view(*scores.shape[:2], *[1] * (scores.dim() - 2))
        whole = torch.cat((scores, groups.expand(*scores.shape[:-1], 1)), -1).softmax(-1)
        return whole[..., :-1], whole[..., -1]

    def take(self, q_heads: slice) -> LayerForm:
        """Return the form of some query heads."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[q_heads])

    @property
    def plain(self) -> bool:
        """True if PyTorch's own attention computes it, with a mask at most."""
        return not self.softcap and self.sinks is None


PLAIN = LayerForm()


def form_at(forms: tuple[LayerForm, ...], layer: int) -> LayerForm:
    """Return the form of a layer. forms: (): all layers are plain."""
    return forms[layer] if forms else PLAIN


def runs_on(q: torch.Tensor, biased: bool) -> Backend:
    """What `decode_attention` takes for a q [..., D]. Without a bias it is PyTorch on every device, since that is the
    stock model's own call; with one it is Triton (k1) on CUDA, but for head sizes that k1 does not take."""
    return "triton" if biased and backend(q) == "triton" and pool_attend.fits(q.shape[-1]) else "torch"


def planned_on(device: torch.device, head_dim: int) -> str:
    """What a run on a device may attend through, before it has begun; once it is over it says what it did."""
    triton = device.type == "cuda" and pool_attend.fits(head_dim)
    return "triton where a bias is added, torch elsewhere" if triton else "torch"


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    live: Live | None = None,
    form: LayerForm = PLAIN,
) -> torch.Tensor:
    """q [1, Hq, 1, D], keys and values [H_kv, C, D] -> [1, Hq, 1, D]. bias [H_kv, G, C] is added to the scores; -inf
    hides a slot. live: the bias's pages for k1, where they are known. form: of the layer; its window is not applied
    here, the slots or the bias have it.

    Without a bias this is the very call the stock model makes, so the result is the same bit for bit. With one, CUDA
    tensors take k1, and others PyTorch, where the query heads of a group are packed as rows of their KV head.
    """
    kv_heads, head_dim = keys.shape[0], keys.shape[2]
    if not form.plain:
        weights = attention_weights(q[0, :, 0], keys, bias, scaling, form)
        return (weights @ values.float()).view(q.shape).to(q.dtype)
    if bias is None:
        gqa = q.shape[1] != kv_heads
        return F.scaled_dot_product_attention(q, keys[None], values[None], scale=scaling, enable_gqa=gqa)
    if runs_on(q, biased=True) == "triton":
        return pool_attend.pool_attention(q, keys, values, bias, scaling, live)
    packed = q.view(1, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(
        packed, keys[None], values[None], attn_mask=bias[None].to(q.dtype), scale=scaling
    )
    return out.reshape(q.shape)


def prefill_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, form: LayerForm = PLAIN
) -> torch.Tensor:
    """Exact causal attention of a prompt chunk: q [1, Hq, m, D], the last m of the N positions of keys, values [1,
    H_kv, N, D]."""
    m, n, gqa = q.shape[2], keys.shape[2], q.shape[1] != keys.shape[1]
    if m < n and form.window and n > form.window + m - 1:
        keys, values = keys[:, :, n - form.window - m + 1 :], values[:, :, n - form.window - m + 1 :]
        n = keys.shape[2]
    if not form.plain:
        return partial_attention(q, keys[0], values[0], causal(m, n, form.window, q.device)[None], scaling, form=form)
    if not form.window or n <= form.window:
        if m == n:
            return F.scaled_dot_product_attention(q, keys, values, scale=scaling, is_causal=m > 1, enable_gqa=gqa)
        mask = causal(m, n, 0, q.device)
    else:
        mask = causal(m, n, form.window, q.device)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scaling, enable_gqa=gqa)


def causal(m: int, n: int, window: int, device: torch.device) -> torch.Tensor:
    """Return bool [m, n]: what each of the last m of n positions sees: itself and those before it, at most `window` of
    them in all (0: all)."""
    visible = torch.ones(m, n, dtype=torch.bool, device=device).tril(n - m)
    return visible.triu(n - m - window + 1) if window else visible


def partial_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    near: torch.Tensor | None = None,
    near_start: int = 0,
    rows: int = 128,
    form: LayerForm = PLAIN,
) -> torch.Tensor:
    """Attention of a prompt chunk that attends some of what was read, `rows` queries at a time: q [1, Hq, m, D], keys,
    values [H_kv, N, D], visible bool [H_kv|1, m, N] -> [1, Hq, m, D]. near: the queries as the `near_start` keys see
    them, None: as they are. Softmax and products in float32."""
    packed, whole = q[0].float().unflatten(0, (keys.shape[0], -1)), keys.float().transpose(-1, -2)[:, None]
    turned = None if near is None else near[0].float().unflatten(0, (keys.shape[0], -1))
    outs = []
    for row in range(0, q.shape[2], rows):
        part = slice(row, row + rows)
        scores = packed[:, :, part] @ whole
        if turned is not None:
            scores[..., :near_start] = turned[:, :, part] @ whole[..., :near_start]
        weights = form.weigh(form.cap(scores * scaling).masked_fill(~visible[:, None, part], float("-inf")))
        outs.append(weights @ values.float()[:, None])
    return torch.cat(outs, 2).flatten(0, 1)[None].to(q.dtype)


def add_received(
    received: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    rows: int = 128,
    form: LayerForm = PLAIN,
) -> None:
    """Add to received float32 [Hq, n] the attention that the last m of N positions give each token: sums over queries
    of exact causal softmax, `rows` queries at a time, never m x N at once. q [Hq, m, D], keys [H_kv, N, D]."""
    (heads, m, dim), positions = q.shape, keys.shape[1]
    packed = q.float().view(keys.shape[0], -1, m, dim)
    wide = keys.float().transpose(-1, -2)[:, None]
    for row in range(0, m, rows):
        part = packed[:, :, row : row + rows]
        last = positions - m + row + part.shape[2]
        unseen = ~causal(part.shape[2], last, form.window, q.device)
        weights = form.weigh(form.cap(part @ wide[..., :last] * scaling).masked_fill(unseen, float("-inf")))
        received[:, :last] += weights.sum(2).reshape(heads, last)


def attention_weights(
    q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None, scaling: float, form: LayerForm = PLAIN
) -> torch.Tensor:
    """The weights of `decode_attention`, computed beside it in float32 for the log; leading dimensions [...] are
    layers, of which a form with sinks takes one.

    q [..., Hq, D], keys [..., H_kv, C, D], bias [..., H_kv, G, C] -> [..., H_kv, G, C], rows add up to 1, or to less
    where a sink logit takes the rest.
    """
    return attention_shares(q, keys, bias, scaling, form)[0]


def attention_shares(
    q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None, scaling: float, form: LayerForm = PLAIN
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `attention_weights` and the share [..., H_kv, G] that a sink logit takes; None: there is no such logit."""
    kv_heads, head_dim = keys.shape[-3], keys.shape[-1]
    packed = q.reshape(*q.shape[:-2], kv_heads, -1, head_dim).float()
    scores = form.cap((packed @ keys.float().transpose(-1, -2)).mul_(scaling))
    scores = scores if bias is None else scores + bias
    if form.sinks is None:
        return form.shares(scores)
    weights, sink = form.shares(scores.view(scores.shape[-3:]))
    return weights.view(scores.shape), None if sink is None else sink.view(scores.shape[:-1])


def grouped_scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [H_kv, G, m, D], keys [H_kv, n, D] -> their products [H_kv, G, m, n]. The query heads of a KV head go in one
    product: as a broadcast one it would copy the keys for each of them."""
    return (q.flatten(1, 2) @ keys.mT).unflatten(1, q.shape[1:3])


def grouped_output(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [H_kv, G, m, n], values [H_kv, n, D] -> [H_kv, G, m, D], in one product for a KV head."""
    return (weights.flatten(1, 2) @ values).unflatten(1, weights.shape[1:3])
