"""From what a step looked like to what is logged of it: masses, entropies, coverage. Pure functions of a snapshot.

Shapes: L layers, Hq query heads, H_kv KV heads, G = Hq / H_kv, C slots, S span ids, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from kvlens.kernels.attend import attention_weights
from kvlens.memory import FREE, ROLE
from kvlens.rows import MASS_COLUMNS, Scores

EXACT = (ROLE["sink"], ROLE["anchor"], ROLE["window"], ROLE["resident"])
"""Roles whose entries are attended exactly, for coverage."""


@dataclass
class Attended:
    """The attention of some layers, frozen: weights [l, H_kv, G, C] and what each slot held, role, span, position [l, H_kv, C]."""

    weights: torch.Tensor
    bias: torch.Tensor | None
    """[l, H_kv, G, C]; None: every slot was attended as it is"""
    role: torch.Tensor
    span: torch.Tensor
    position: torch.Tensor


@dataclass
class Zooms:
    """What each layer could and did read token by token: fine, hot [L, H_kv, G|1, S], zoomable [L, S], all bool."""

    fine: torch.Tensor
    hot: torch.Tensor
    zoomable: torch.Tensor


@dataclass(frozen=True)
class Ranked:
    """How one layer ranked spans: score [H_kv, S], NaN = no candidate; want [H_kv, W] span ids, -1 = none."""

    score: torch.Tensor
    want: torch.Tensor


@dataclass
class Snapshot:
    """One step as it was when its attention had been computed."""

    groups: list[Attended]
    """covering the layers in order"""
    q: torch.Tensor
    """[L, Hq, D] float32, post-RoPE"""
    previous_q: torch.Tensor | None
    zooms: Zooms | None
    ranked: list[Ranked | None]
    """per layer; None: no ranking there"""
    head_columns: dict[str, torch.Tensor]
    """columns the method itself knows, [L, Hq], NaN where it does not"""
    kv_columns: dict[str, torch.Tensor]
    """[L, H_kv]"""
    shadow: torch.Tensor | None
    """[L, H_kv, n, D]: keys of all positions so far"""
    scaling: float
    spans: int


@dataclass
class Measured:
    """head: columns [L, Hq]; kv: columns [L, H_kv]; span_mass [L, Hq, S]; worst: largest |sum of masses - 1|."""

    head: dict[str, np.ndarray]
    kv: dict[str, np.ndarray]
    span_mass: torch.Tensor
    worst: float


def measure(shot: Snapshot) -> Measured:
    """All columns of a step."""
    parts = [_masses(group, shot.spans) for group in shot.groups]
    mass, entropy, tokens, coarse = (torch.cat(column) for column in zip(*parts, strict=True))
    roles = mass.sum(-1)
    columns = {name: roles[..., code] for code, name in enumerate(MASS_COLUMNS)}
    columns["entropy"] = entropy
    if shot.previous_q is not None:
        columns["qcos"] = torch.cosine_similarity(shot.q, shot.previous_q, dim=-1)
    if shot.zooms is not None:
        columns |= _zoom_columns(shot.zooms)
    if shot.shadow is not None:
        columns["coverage"] = _coverage(shot)
    worst = float((roles[..., : len(MASS_COLUMNS)].sum(-1) - 1).abs().max())
    columns |= shot.head_columns
    head = {name: column.numpy(force=True).astype(np.float32) for name, column in columns.items()}
    kv_columns = {"attended_tokens": tokens, "attended_coarse": coarse, **shot.kv_columns}
    kv = {name: column.numpy(force=True).astype(float) for name, column in kv_columns.items()}
    return Measured(head, kv, mass.sum(-2), worst)


def _masses(group: Attended, spans: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mass by role and span [l, Hq, R, S], entropy in nats [l, Hq], attended tokens and coarse entries [l, H_kv]."""
    p = group.weights
    role = group.role.long()
    bins = (role * spans + group.span)[:, :, None].expand_as(p)
    mass = p.new_zeros(*p.shape[:3], (FREE + 1) * spans).scatter_add_(-1, bins, p)
    entropy = torch.special.entr(p).sum(-1)
    seen = role != FREE if group.bias is None else (group.bias > -math.inf).any(2)
    coarse = (seen & (role == ROLE["coarse"])).sum(-1)
    return mass.unflatten(-1, (FREE + 1, spans)).flatten(1, 2), entropy.flatten(1, 2), seen.sum(-1) - coarse, coarse


def _zoom_columns(zooms: Zooms) -> dict[str, torch.Tensor]:
    zoomable = zooms.zoomable[:, None, None]
    zoomed = (zooms.fine & zooms.hot & zoomable).sum(-1).flatten(1, 2).float()
    possible = zooms.zoomable.sum(-1, keepdim=True).float()
    zoomed = torch.where(possible > 0, zoomed, torch.nan)
    return {"n_zoomed": zoomed, "zoom_rate": torch.where(possible > 0, zoomed / possible.clamp(min=1), torch.nan)}


def _coverage(shot: Snapshot) -> torch.Tensor:
    """Share of full attention's mass [L, Hq] on positions whose tokens the query head attended exactly."""
    assert shot.shadow is not None
    full = attention_weights(shot.q, shot.shadow, None, shot.scaling)
    n, covered, first = shot.shadow.shape[2], [], 0
    for group in shot.groups:
        role = group.role
        exact = role != ROLE["coarse"]
        for code in (ROLE["reconstructed"], FREE):
            exact &= role != code
        attended = exact[:, :, None].expand_as(group.weights)
        if group.bias is not None:
            attended = attended & (group.bias > -math.inf)
        layers = group.weights.shape[0]
        part = full[first : first + layers]
        # Slots that are not attended exactly look up an extra position of weight 0.
        where = torch.where(attended, group.position.long()[:, :, None], n)
        padded = torch.cat([part, part.new_zeros(*part.shape[:3], 1)], -1)
        covered.append(padded.gather(-1, where).sum(-1).flatten(1, 2))
        first += layers
    return torch.cat(covered)


def scores(shot: Snapshot, top: int) -> Scores | None:
    """The `top` best candidates of every (layer, KV head); None where no layer ranked anything."""
    some = next((ranked for ranked in shot.ranked if ranked is not None), None)
    if some is None:
        return None
    heads, width = some.score.shape[0], min(top, some.score.shape[1])
    nothing = Ranked(torch.full_like(some.score, math.nan), some.want.new_full((heads, 1), -1))
    spans, values, chosen, candidates = [], [], [], []
    for ranked in shot.ranked:
        score, want = (ranked or nothing).score.float(), (ranked or nothing).want
        known = score.isfinite()
        best = score.masked_fill(~known, -math.inf).topk(width, -1)
        listed = known.gather(-1, best.indices)
        wanted = (want[:, None] == best.indices[:, :, None]).any(-1)
        spans.append(torch.where(listed, best.indices, -1))
        values.append(best.values.masked_fill(~listed, math.nan))
        chosen.append(wanted & listed)
        candidates.append(known.sum(-1))
    return Scores(
        torch.stack(spans).numpy(force=True).astype(np.int32), torch.stack(values).numpy(force=True),
        torch.stack(chosen).numpy(force=True), torch.stack(candidates).numpy(force=True).astype(np.int32),
    )  # fmt: skip
