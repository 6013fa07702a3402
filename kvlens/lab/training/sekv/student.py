"""SeKV's forward pass with gradients: a frozen model over mixed-resolution memory (SeKV sec. 3.3).

Shapes: L layers, B documents, H query heads, H_kv KV heads, G = H / H_kv, D head size, T suffix tokens, E exact tokens,
S spans of at most m tokens, R ranks, d' routing dimension.

The prefix goes through the model once, with full attention (the teacher). Its keys and values are constants. Then the
suffix alone goes through the same model again; each of its positions attends in one softmax to the exact tokens (sinks,
anchors, raw spans, the window at the end of the prefix), to the suffix before it, and to every span in one of two
resolutions. z in {0, 1} decides which; its gradient is that of the sigmoid gate it comes from (straight-through), so
attention is written as a ratio linear in z. What does not depend on the queries (summaries, gates, rebuilt spans) is
computed for all layers at once, before the pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvlens.kernels import lowrank
from kvlens.lab.training.sekv.batch import Batch
from kvlens.lab.training.sekv.mixing import Entries, MixedAttention
from kvlens.lab.training.sekv.settings import SeKVTraining
from kvlens.methods.sekv import router as sekv_router


class RouterModule(nn.Module):
    """What is learned: W, tau and g_phi."""

    def __init__(self, weight: Tensor, max_rank: int, tau: float, open_gates: float) -> None:
        """weight, tau, open_gates: start of W [L, H, d', D], of all thresholds, and of the gates' last bias. Gates that
        start open and thresholds that start low expand everything at first."""
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.tau = nn.Parameter(torch.full(weight.shape[:2], tau))
        self.gates = sekv_router.GateMLP(max_rank, weight.shape[2])
        last = self.gates.net[-1]
        assert isinstance(last, nn.Linear)
        nn.init.constant_(last.bias, open_gates)


class Pass:
    """A trip of the student through the model, over the memory of a batch."""

    def __init__(self, batch: Batch, router: RouterModule, exponent: float = SeKVTraining.exponent) -> None:
        """exponent: as the setting of that name."""
        self.batch, self.exponent = batch, exponent
        self.scores: list[Tensor] = []
        """per layer [B, H, T, S], before the sigmoid"""
        self.zooms: list[Tensor] = []
        """per layer z [B, H, T, S], with straight-through gradient"""
        self.summary = sekv_router.summaries(router.weight[:, None], batch.mean_keys)
        """[L, B, H, S, d']"""
        group = router.weight.shape[1] // batch.mean_keys.shape[2]
        shared = self.summary.unflatten(2, (-1, group)).mean(3)
        span_keys, key_gates = _rebuild(router, batch, batch.key_factors, shared, is_value=False)
        span_values, value_gates = _rebuild(router, batch, batch.value_factors, shared, is_value=True)
        self.gates = key_gates, value_gates
        """m of keys and values [L, B, H_kv, S, R]"""
        self._keys = torch.cat((batch.exact_keys, batch.mean_keys, _tokens(span_keys, batch)), 3).unbind()
        self._values = torch.cat((batch.exact_values, batch.mean_values, _tokens(span_values, batch)), 3).unbind()
        self._parts = list(zip(router.weight.unbind(), router.tau.unbind(), self.summary.unbind(), strict=True))
        """of each layer W, tau and the summaries: taken apart at once, so that their gradients are put together at
        once"""
        self._entries = Entries(batch.is_exact.shape[1], batch.is_span.shape[1], batch.token // batch.in_span.shape[2])
        self._bias = _bias(batch)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [B, H, T, D], key and value of the suffix [B, H_kv, T, D] -> [B, H, T, D]."""
        weight, tau, summary = self._parts[layer]
        routed = sekv_router.route(weight, query)
        score = sekv_router.scores(routed, summary, self.batch.length[:, None, None], self.batch.is_span[:, None, None])
        z = straight_through(score.sigmoid(), tau)
        self.scores.append(score)
        self.zooms.append(z)
        groups = (key.shape[1], query.shape[1] // key.shape[1])
        out = MixedAttention.apply(  # type: ignore[no-untyped-call]
            (query * scale).unflatten(1, groups),
            torch.cat((self._keys[layer], key), 2),
            torch.cat((self._values[layer], value), 2),
            z.unflatten(1, groups),
            self._bias,
            self._entries,
            self.exponent,
        )
        attended: Tensor = out.flatten(1, 2)
        return attended


def straight_through(probability: Tensor, tau: Tensor) -> Tensor:
    """z = 1[a > tau] with the gradient of a - tau. probability [..., H, T, S], tau [H]."""
    margin = probability - tau[:, None, None]
    return (margin > 0).to(margin.dtype) + margin - margin.detach()


def _rebuild(
    router: RouterModule, batch: Batch, factors: tuple[Tensor, Tensor, Tensor], summary: Tensor, is_value: bool
) -> tuple[Tensor, Tensor]:
    """Gated reconstruction (eq. 7-8) of all layers: [L, B, H_kv, S, m, D] and the gates [L, B, H_kv, S, R]. summary [L,
    B, H_kv, S, d']."""
    u, sigma, v = factors
    lengths = batch.length[:, None].expand(sigma.shape[:-1])
    gates = router.gates(sigma, summary, lengths, is_value).sigmoid()
    return lowrank.reconstruct(u, gates * sigma, v), gates


def _tokens(x: Tensor, batch: Batch) -> Tensor:
    """Return the rows of spans x [L, B, H_kv, S, m, D] that are tokens [L, B, H_kv, F, D]."""
    row = batch.token[None, :, None, :, None].expand(*x.shape[:3], -1, x.shape[-1])
    return x.flatten(3, 4).gather(3, row)


def _bias(batch: Batch) -> Tensor:
    """Return what is added to attention logits [B, 1, 1, T, N]: log|S| for coarse entries, -inf for padding and for
    what comes later in the suffix."""
    hidden = torch.tensor(float("-inf"), device=batch.length.device)
    zero = torch.zeros_like(hidden)
    memory = torch.cat(
        (
            torch.where(batch.is_exact, zero, hidden),
            torch.where(batch.is_span, batch.length.log(), hidden),
            torch.where(batch.is_token, zero, hidden),
        ),
        1,
    )
    count, positions = batch.suffix_ids.shape
    causal = hidden.expand(positions, positions).triu(1)
    rows = (memory[:, None].expand(-1, positions, -1), causal.expand(count, -1, -1))
    return torch.cat(rows, 2)[:, None, None]
