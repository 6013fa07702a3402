"""What lost choices owe to what was not read: the effect of every (layer, KV head, span) on it, in logits.

Regret is attention mass, and mass is not effect: a head may put most of its attention on a token whose value says
nothing, and losing that changes no answer. Here full KV goes along the reference's tokens once more, with gradients,
while what each query head gets of the spans that the method left unread is taken away, part by part. *Lead* is the
logit of full KV's token minus that of the method's, at a lost step. With weights w and values v a head's output is
o = sum of w v; without the unread it is o' = sum of (1 - u) w v / sum of (1 - u) w, where u is the share of full
attention's mass on a token's span that was not read. o - o' = sum of u w (v - o'), so each span's part is known. The
effect of a span is the gradient of lead by the head's output times the span's part, the mean over POINTS points of the
way from o to o', which all heads go at once. Added over the query heads of a KV head, and over the steps up to the lost
one, whose keys and values it reads, the effects of all spans come to what lead loses on that way, to the error of so
few points.

Ours: integrated gradients (Sundararajan et al. 2017, section 3) with the unread spans as the features. It knows nothing
of what two heads bring together that neither brings alone; what it names is tried by holding it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from kvlens.engine.comparison import Reference
from kvlens.engine.hf_attention import SessionCache, forms_of
from kvlens.engine.models import LoadedModel
from kvlens.engine.prefill import ReadPrompt
from kvlens.engine.unread import Query, Unread, unread_of
from kvlens.instruments import MOST_EFFECT_STEPS, Effects, Loss, Oracle
from kvlens.kernels.attend import LayerForm, causal, form_at, grouped_output, grouped_scores
from kvlens.rows import SpanRow
from kvlens.shape import KVShape

POINTS = 4
"""on the way from what full KV gives to what is left without the unread, in the middles of as many parts"""
MOST_WEIGHTS = 1 << 24
"""attention weights of one layer, some 64 bytes for each in float32 while the layer is gone through; a longer context
gets fewer steps: 16 of 32 query heads over 32,768 tokens"""
MOST_TRIPLES = 64
"""that are kept, most effect first"""
_LEAST_READ = 1e-6
"""attention on what was read, below which it counts as this much"""


@dataclass
class FullAttention:
    """A session of full KV after a prompt that was read before (kvlens.engine.hf_attention.LayerSession). Where
    gradients are wanted, each head's output is `way` (0..1) of the way to what is left without the unread. Attention
    weights live for one layer at a time: the way back through a layer computes them again."""

    prompt_keys: Sequence[torch.Tensor]
    """of each layer [H_kv, N, D]"""
    prompt_values: Sequence[torch.Tensor]
    unread: Unread
    way: float
    keys: list[torch.Tensor]
    """of the tokens fed since, of each layer [H_kv, m, D]"""
    values: list[torch.Tensor]
    forms: tuple[LayerForm, ...] = ()
    """of the layers; (): plain"""
    queries: dict[int, Query] = field(default_factory=dict)
    """by layer, where gradients were wanted"""
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """by layer [H_kv, G, m, D], in the graph"""

    @classmethod
    def continue_from(
        cls, read: ReadPrompt, unread: Unread, way: float, forms: tuple[LayerForm, ...] = ()
    ) -> FullAttention:
        keys, values = list(read.keys.unbind()), list(read.values.unbind())
        return cls(keys, values, unread, way, [k[:, :0] for k in keys], [v[:, :0] for v in values], forms)

    def form(self, layer: int) -> LayerForm:
        return form_at(self.forms, layer)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[layer] = torch.cat([self.keys[layer], keys], 1)
        self.values[layer] = torch.cat([self.values[layer], values], 1)

    def tokens_seen(self, layer: int) -> int:
        return self.prompt_keys[layer].shape[1] + self.keys[layer].shape[1]

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        query = Query(q[0].unflatten(0, (len(self.keys[layer]), -1)), scaling)
        if torch.is_grad_enabled():
            output = checkpoint(self._part_way, layer, query, self.keys[layer], self.values[layer], use_reentrant=False)
            if not output.requires_grad:
                output.requires_grad_(True)
            self.outputs[layer], self.queries[layer] = output, Query(query.q.detach(), scaling)
        else:
            weights = self._weights(layer, query, self.keys[layer])
            output = grouped_output(weights, self._all_values(layer, self.values[layer])[:, 0])
        return output.flatten(0, 1)[None].to(q.dtype)

    def parts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what a layer's output is made of: weights [H_kv, G, m, n], values [H_kv, 1, n, D], and the output
        without what was unread [H_kv, G, m, D]."""
        weights = self._weights(layer, self.queries[layer], self.keys[layer].detach())
        values = self._all_values(layer, self.values[layer].detach())
        return weights, values, self._remainder(layer, weights, values)

    def _part_way(self, layer: int, query: Query, new_keys: torch.Tensor, new_values: torch.Tensor) -> torch.Tensor:
        weights, values = self._weights(layer, query, new_keys), self._all_values(layer, new_values)
        output = grouped_output(weights, values[:, 0])
        return output + self.way * (self._remainder(layer, weights, values) - output)

    def _weights(self, layer: int, query: Query, new_keys: torch.Tensor) -> torch.Tensor:
        """[H_kv, G, m, n], in float32 at least."""
        q, m = query.q, query.q.shape[2]
        keys = torch.cat([self.prompt_keys[layer], new_keys], 1)
        scores = grouped_scores(q, keys).to(torch.promote_types(q.dtype, torch.float32)) * query.scaling
        form, unseen = self.form(layer), ~causal(m, scores.shape[-1], self.form(layer).window, q.device)
        return form.weigh(form.cap(scores).masked_fill(unseen, -torch.inf))

    def _all_values(self, layer: int, new_values: torch.Tensor) -> torch.Tensor:
        """[H_kv, 1, n, D], in float32 at least."""
        values = torch.cat([self.prompt_values[layer], new_values], 1)[:, None]
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def _remainder(self, layer: int, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rest = weights * (1 - self.unread.read_layer(layer)).reshape(weights.shape).to(weights.dtype)
        sink = 0.0 if self.form(layer).sinks is None else 1 - weights.sum(-1, keepdim=True)
        return grouped_output(rest, values[:, 0]) / (rest.sum(-1, keepdim=True) + sink).clamp(min=_LEAST_READ)


def reach(shape: KVShape, tokens: int) -> int:
    """How many steps of a run of so many tokens can be gone along with gradients; 0: none."""
    return min(MOST_EFFECT_STEPS, MOST_WEIGHTS // (shape.q_heads * tokens))


def effects(
    loaded: LoadedModel,
    read: ReadPrompt,
    reference: Reference,
    steps: Sequence[tuple[Loss | None, Oracle | None]],
    spans: Iterable[SpanRow],
    end: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> Effects | None:
    """Return the effects added over all lost steps before `end` that are within reach. steps: what was recorded from
    step 0 on, all fed the reference's tokens; spans: of the run, all of them; `check` is called before every point and
    may raise. None where nothing was lost, full attention was not recorded then, or the context is too long
    (MOST_WEIGHTS)."""
    losses = {step: loss for step, (loss, oracle) in enumerate(steps[:end]) if loss and oracle and not loss.agrees}
    most = reach(loaded.shape, len(read.ids) + len(reference.ids))
    if not losses or most < 1:
        return None
    begin = max(0, min(losses) + 1 - (most if len(losses) == 1 else (most + 1) // 2))
    losses = {step: loss for step, loss in losses.items() if step < begin + most}
    last = max(losses) + 1
    oracles, tokens = [oracle for _, oracle in steps[begin:last]], len(read.ids) + last - 1
    unread = unread_of(oracles, begin, list(spans), tokens, loaded)
    pairs = {step: (int(reference.logits[step].argmax()), loss.top_token) for step, loss in losses.items()}
    moved = []
    for way in _ways():
        check()
        moved.append(_moved(loaded, read, reference.ids, pairs, begin, unread, way))
    leads = [
        float(reference.logits[step, token] - reference.logits[step, rival]) for step, (token, rival) in pairs.items()
    ]
    return _most(tuple(pairs), sum(leads), np.mean(moved, axis=0))


def _ways() -> list[float]:
    return [(point + 0.5) / POINTS for point in range(POINTS)]


def _moved(
    loaded: LoadedModel,
    read: ReadPrompt,
    ids: Sequence[int],
    pairs: Mapping[int, tuple[int, int]],
    begin: int,
    unread: Unread,
    way: float,
) -> np.ndarray:
    """Return logits [L, H_kv, spans]: each span's part of what the leads of all lost steps lose together at one point
    of the way. pairs: full KV's token and the method's, by lost step. The steps before `begin` leave their keys and
    values alone."""
    fed = torch.tensor([[read.ids[-1], *ids[: max(pairs)]]], device=loaded.model.device)
    shape = loaded.shape.bound(len(read.ids) + len(ids))
    session = FullAttention.continue_from(read, unread, way, forms_of(loaded.model, shape))
    cache = SessionCache(session, loaded.shape.layers)
    with torch.inference_mode(False):
        if begin:
            with torch.no_grad():
                loaded.model.base_model(input_ids=fed[:, :begin], past_key_values=cache, use_cache=True)
        with torch.enable_grad():
            logits = loaded.model(input_ids=fed[:, begin:], past_key_values=cache, use_cache=True).logits[0]
            lead = torch.stack(
                [
                    logits[step - begin, token].double() - logits[step - begin, rival].double()
                    for step, (token, rival) in pairs.items()
                ]
            ).sum()
            slopes = torch.autograd.grad(lead, list(session.outputs.values()))
    with torch.no_grad():
        return np.array([_by_span(session, *pair) for pair in zip(session.outputs, slopes, strict=True)])


def _by_span(session: FullAttention, layer: int, slope: torch.Tensor) -> np.ndarray:
    """[H_kv, spans]. slope: gradient of the lead by the layer's output [H_kv, G, m, D]."""
    weights, values, left = session.parts(layer)
    shares = session.unread.read_layer(layer).reshape(weights.shape)
    owner = session.unread.owner
    rows = []
    for head, towards in enumerate(slope.double()):  # one KV head at a time: in float64 the weights are large
        unread = weights[head].double() * shares[head]
        contribution = towards @ values[head].double().mT - (towards * left[head].double()).sum(-1, keepdim=True)
        sums = unread.new_zeros(unread.shape[1], session.unread.count + 1)
        rows.append(sums.scatter_add(1, owner, (unread * contribution).sum(0)).sum(0)[:-1])
    by_span: np.ndarray = torch.stack(rows).cpu().numpy()
    return by_span


def _most(steps: tuple[int, ...], lead: float, moved: np.ndarray) -> Effects:
    """Return the triples with most effect. moved: logits [L, H_kv, spans]."""
    order = np.argsort(-moved, axis=None, kind="stable")[:MOST_TRIPLES]
    order = order[(moved.reshape(-1)[order] > 0) & np.isfinite(moved.reshape(-1)[order])]
    layer, head, span = np.unravel_index(order, moved.shape)
    effect = moved.reshape(-1)[order].astype(np.float32)
    return Effects(steps[0], lead, layer.astype(np.int32), head.astype(np.int32), span.astype(np.int32), effect, steps)
