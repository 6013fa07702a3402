"""How SeKV's spans lie in host memory: gated low-rank factors, or exact where factors would be larger (SeKV sec.
3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlens.kernels import lowrank
from kvlens.kernels.lowrank_bytes import factor_elements, raw_elements
from kvlens.link.codec import Cut, Packed, Units
from kvlens.methods.run_inputs import Rotate
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.methods.sekv.router import GateMLP

TOGETHER = 1 << 24
"""numbers of keys that are decomposed at once, so that what it takes does not grow with the prompt"""

Tell = Callable[[list[int], dict[str, Tensor]], None]
"""ids of the spans that were packed together, and figures [S, L, H_kv] of them by their name in the journal"""


@dataclass(frozen=True)
class Parts:
    """Decomposed matrices [m, D]: U [..., m, R], sigma, gates [..., R], V [..., R, D]; one for each (layer, KV head,
    span)."""

    u: Tensor
    sigma: Tensor
    gates: Tensor
    v: Tensor
    energy: Tensor
    """squared Frobenius norm of the whole matrix [...]"""

    def rank(self, drop: float) -> Tensor:
        """Components that stay, [...]."""
        return self.choose_kept(drop).sum(-1)

    def choose_kept(self, drop: float) -> Tensor:
        """Which components stay, bool [..., R]: those whose gate is above `drop`, and the strongest."""
        mask = self.gates > drop
        mask[..., 0] = True
        return mask

    def best_error(self, rank: Tensor) -> Tensor:
        """Relative Frobenius error of the `rank` [...] strongest components, ungated."""
        mask = torch.arange(self.sigma.shape[-1], device=rank.device) < rank[..., None]
        lost_energy = 1 - (self.sigma.square() * mask).sum(-1) / self.energy.clamp_min(1e-30)
        return lost_energy.clamp_min(0).sqrt()


class SpanCodec:
    """Packs spans of m tokens for all layers L and KV heads H_kv. Gates come from g_phi (eq. 7) or, without one, from
    the energy. With pre_rope the keys are decomposed without their rotary embedding, and turned again in `unpack`.
    """

    def __init__(
        self,
        params: SeKVParameters,
        gates: GateMLP | None,
        pending: dict[int, Tensor],
        rotate: Rotate | None,
        tell: Tell,
        whole: Tensor,
    ) -> None:
        """pending: of the spans to be packed, by id, their summaries averaged over the group [L, H_kv, d'], an input
        of g_phi; each is gone once its span is packed. tell: called when they are. whole bool [L, H_kv]: KV heads of
        which nothing is packed."""
        self.params, self.gates, self.pending, self.rotate, self._tell = params, gates, pending, rotate, tell
        self._whole = whole

    def pack(self, keys: Tensor, values: Tensor, first: int, cuts: Sequence[Cut]) -> Packed | None:
        """keys, values [L, H_kv, m, D] of the positions from `first` on. Spans of one length are packed together."""
        if self.params.form == "raw":
            return None
        summaries = [self.pending.pop(cut.span) for cut in cuts]
        size = (*keys.shape[:2], len(cuts))
        table, errors = torch.zeros(*size, 4, dtype=torch.long), torch.full((*size, 2), torch.nan)
        figures: dict[str, Tensor] = {}
        packed: list[tuple[list[int], Tensor, Tensor]] = []
        for places in _alike(cuts, keys.shape[0] * keys.shape[1] * keys.shape[3]):
            group = [cuts[i] for i in places]
            summary = torch.stack([summaries[i].float() for i in places], 2)
            records, units = self._pack_alike(keys, values, first, group, summary)
            for name, of_group in records.items():
                figures.setdefault(name, torch.zeros(size, device=keys.device))[:, :, places] = of_group.float()
            table[:, :, places, 1:], errors[:, :, places] = units.shape.cpu(), units.errors.cpu()
            packed.append((places, units.numbers, units.size.cpu()))
        if cuts:
            self._tell([cut.span for cut in cuts], {name: figure.permute(2, 0, 1) for name, figure in figures.items()})
        return _joined(packed, table, errors, keys)

    def unpack(self, numbers: Tensor, units: Units) -> tuple[Tensor, Tensor]:
        """The factors after they came to the device -> keys, values [n, T, D] as attention uses them (eq. 8)."""
        start, n, rank_k, rank_v = units.table.unbind(-1)
        turn = self.rotate if self.params.pre_rope else None
        sizes = (units.tokens, min(self.params.max_rank, units.tokens, units.dim), units.dim)
        keys = lowrank.dense_units(numbers, start, n, rank_k, sizes, wide=turn is not None)
        values = lowrank.dense_units(numbers, start + rank_k * (n + units.dim + 1), n, rank_v, sizes)
        if turn is None:
            return keys, values
        positions = (units.start[:, None] + torch.arange(units.tokens, device=numbers.device)).flatten()
        turned = turn(keys.reshape(1, -1, units.dim), positions, units.layer)
        return turned.view(keys.shape).to(values.dtype), values

    def _pack_alike(
        self, keys: Tensor, values: Tensor, first: int, cuts: Sequence[Cut], summary: Tensor
    ) -> tuple[dict[str, Tensor], _Units]:
        """Spans of one length, with their summaries [L, H_kv, S, d']: figures [L, H_kv, S], and the units."""
        positions = torch.cat([torch.arange(cut.start, cut.end, device=keys.device) for cut in cuts])
        k, v = (x.index_select(2, positions - first) for x in (keys, values))
        flat = k
        if self.params.pre_rope:
            assert self.rotate is not None
            flat = self.rotate(k, positions, back=True)
        k, v, flat = (x.unflatten(2, (len(cuts), -1)) for x in (k, v, flat))
        of_keys = self._decompose(flat, summary, is_value=False)
        of_values = self._decompose(v, summary, is_value=True)
        drop = self.params.gate_drop
        figures = {"rank_k": of_keys.rank(drop), "rank_v": of_values.rank(drop)}
        if self.params.pre_rope:
            turned = self._decompose(k, summary, is_value=False)
            figures["rank_k_post_rope"] = turned.rank(drop)
            figures |= {
                f"err_k_{where}_rope": p.best_error(figures["rank_k"])
                for where, p in (("pre", of_keys), ("post", turned))
            }
        return figures, self._units((flat, v), (of_keys, of_values), keys.dtype)

    def _decompose(self, x: Tensor, summary: Tensor, is_value: bool) -> Parts:
        """x [..., m, D], summary [..., d']."""
        u, sigma, v = lowrank.truncated_svd(x, self.params.max_rank)
        energy = x.float().square().sum((-1, -2))
        if self.gates is None:
            gates = lowrank.energy_gates(sigma, energy, self.params.energy)
        else:
            length = torch.full(sigma.shape[:-1], float(x.shape[-2]), device=x.device)
            gates = self.gates(sigma, summary, length, is_value).sigmoid()
        return Parts(u, sigma, gates, v, energy)

    def _units(self, exact: tuple[Tensor, Tensor], parts: tuple[Parts, Parts], dtype: torch.dtype) -> _Units:
        """Keys and values [L, H_kv, S, m, D] with their decompositions -> what is stored of them. Errors of keys are
        those of the keys as they were decomposed: turning both sides alike keeps the norm of their difference."""
        m, dim = exact[0].shape[-2:]
        kept_masks = [part.choose_kept(self.params.gate_drop) for part in parts]
        ranks = torch.stack([mask.sum(-1) for mask in kept_masks], -1)
        size = factor_elements(m, ranks.sum(-1), dim)
        if self.params.form == "smaller":
            size = torch.where(size < raw_elements(m, dim), size, 0)
        size = size.masked_fill(self._whole[..., None], 0)
        stored = size > 0
        columns, masks, errors = [], [], []
        for x, part, keep in zip(exact, parts, kept_masks, strict=True):
            u, g, v = (y.to(dtype) for y in (part.u, torch.where(keep, part.gates * part.sigma, 0), part.v))
            errors.append(lowrank.relative_error(x.float(), lowrank.reconstruct(u, g, v).float()))
            columns += [u.flatten(-2), g, v.flatten(-2)]
            masks += [keep[..., None, :].expand(u.shape).flatten(-2), keep, keep[..., None].expand(v.shape).flatten(-2)]
        numbers = torch.cat(columns, -1)[torch.cat(masks, -1) & stored[..., None]]
        shape = torch.cat((torch.full_like(ranks[..., :1], m), ranks), -1) * stored[..., None]
        return _Units(numbers, size, shape, torch.where(stored[..., None], torch.stack(errors, -1), torch.nan))


@dataclass(frozen=True)
class _Units:
    """Units of S spans of one length. numbers [N]: of all that are stored as factors, layer after layer, KV head after
    KV head, span after span; size [L, H_kv, S], 0: stays raw; shape [L, H_kv, S, 3]: tokens, ranks of keys and values;
    errors [L, H_kv, S, 2]."""

    numbers: Tensor
    size: Tensor
    shape: Tensor
    errors: Tensor


def _alike(cuts: Sequence[Cut], width: int) -> Iterator[list[int]]:
    """Places of spans of one length, as many at once as TOGETHER allows for `width` numbers of a token."""
    of_length: dict[int, list[int]] = {}
    for place, cut in enumerate(cuts):
        of_length.setdefault(cut.end - cut.start, []).append(place)
    for length, places in of_length.items():
        most = max(1, TOGETHER // (length * width))
        yield from (places[i : i + most] for i in range(0, len(places), most))


def _joined(packed: Sequence[tuple[list[int], Tensor, Tensor]], table: Tensor, errors: Tensor, like: Tensor) -> Packed:
    """Groups (places, numbers, sizes [L, H_kv, S_g]) as one payload, layer after layer; within a layer in the order of
    the groups. Fills in where units begin."""
    layers = table.shape[0]
    size = torch.zeros(table.shape[:-1], dtype=torch.long)
    stretches: list[list[Tensor]] = [[] for _ in range(layers)]
    ends = torch.zeros(layers, dtype=torch.long)
    for places, numbers, sizes in packed:
        size[:, :, places] = sizes
        flat = sizes.flatten(1)
        begins = (ends[:, None] + flat.cumsum(1) - flat).view(sizes.shape)
        table[:, :, places, 0] = torch.where(sizes > 0, begins, 0)
        of_layer = flat.sum(1)
        ends += of_layer
        for stretch, part in zip(stretches, numbers.split(of_layer.tolist()), strict=True):
            stretch.append(part)
    payload = torch.cat([part for stretch in stretches for part in stretch]) if packed else like.new_empty(0)
    return Packed("factors", payload, [0, *ends.cumsum(0).tolist()], table, size, errors)
