"""From what steps looked like to what is logged of them: masses, entropies, coverage. Pure functions of snapshots.

Steps are measured several at a time: each tensor operation then costs its overhead once, not once per step. Shapes as
in ``snapshot.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from kvlens.instruments import Scores
from kvlens.recording.decisions import decisions_at, zoom_columns
from kvlens.recording.fullattention import Coding, FullAttention, selection_recall
from kvlens.recording.layerparts import layer_parts
from kvlens.recording.oracle import OracleTables, coverage
from kvlens.recording.snapshot import Attended, Measured, PackedReads, Snapshot, Zooms
from kvlens.rows import MASS_COLUMNS
from kvlens.tiers.slots import FREE, ROLE


def measure(shots: list[Snapshot], top_k: int, ranked: int) -> list[Measured]:
    """All columns of some steps that are alike; the `top_k` spans by mass, the `ranked` best candidates by score."""
    first_shot, steps = shots[0], len(shots)
    tables = OracleTables(shots, top_k)
    if first_shot.keys is not None:
        masses, saved = masses_of_all(shots), None
        shares: tuple[torch.Tensor, ...] = (torch.ones_like(masses[2]),) * 2
        if first_shot.shadow is not None:
            tables.add(None, masses[1], None)
    else:
        masses, shares, saved = _masses_by_parts(shots, tables)
    roles, mass, entropy, tokens, coarse = masses
    columns = {name: roles[..., code] for code, name in enumerate(MASS_COLUMNS)}
    columns["entropy"] = entropy
    if first_shot.previous_q is not None:
        now, before = (
            torch.stack([shot.q for shot in shots]),
            torch.stack([s.previous_q for s in shots if s.previous_q is not None]),
        )
        columns["qcos"] = torch.cosine_similarity(now, before, dim=-1)
    if first_shot.zooms is not None:
        columns |= _zoom_columns([shot.zooms for shot in shots if shot.zooms is not None])
    if first_shot.shadow is not None:
        columns |= dict(zip(("coverage", "selection_recall"), shares, strict=True))
    oracles, missed, oracle_worst = tables.join()
    columns |= {name: torch.stack([shot.head_columns[name] for shot in shots]) for name in first_shot.head_columns}
    index = torch.tensor([shot.index_bytes for shot in shots], device=tokens.device)[..., None]
    kv_columns = {"attended_tokens": tokens, "attended_coarse": coarse}
    kv_columns["read_bytes"] = (tokens + coarse) * first_shot.entry_bytes + index
    if saved is not None:
        kv_columns["read_bytes"] = kv_columns["read_bytes"] - saved
    kv_columns |= {name: torch.stack([shot.kv_columns[name] for shot in shots]) for name in first_shot.kv_columns}
    worst = (roles[..., : len(MASS_COLUMNS)].sum(-1) - 1).abs().flatten(1).amax(1).tolist()
    head = {name: column.numpy(force=True).astype(np.float32) for name, column in columns.items()}
    decided = [None if shot.decided is None else decisions_at(shot.decided) for shot in shots]
    if first_shot.zooms is not None:
        zooms = [zoom_columns(step, *first_shot.q.shape[:2]) for step in decided]
        missed = [columns | step for columns, step in zip(missed, zooms, strict=True)]
    kv = {name: column.numpy(force=True).astype(float) for name, column in kv_columns.items()}
    top = mass.topk(min(top_k, first_shot.spans), -1)
    top_span = torch.where(top.values > 0, top.indices, -1).numpy(force=True).astype(np.int32)
    tail = (mass.sum(-1) - top.values.sum(-1)).clamp(min=0) + roles[..., ROLE["mean"]]
    top_mass, tail_mass, scores = top.values.numpy(force=True), tail.numpy(force=True), _scores(shots, ranked)
    return [
        Measured(
            {name: column[t] for name, column in head.items()} | missed[t],
            {name: column[t] for name, column in kv.items()},
            top_span[t],
            top_mass[t],
            tail_mass[t],
            scores[t],
            worst[t],
            oracles[t],
            oracle_worst[t],
            decided[t],
        )
        for t in range(steps)
    ]


def _masses_by_parts(
    shots: list[Snapshot], tables: OracleTables
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Return the columns of `_masses` of all layers, the columns coverage and selection recall [T, L, Hq] (none without
    keys), and the bytes [T, L, H_kv] that packed tokens save in reading, None: nothing is packed. A few layers are
    measured at a time, and added to the tables."""
    masses, shares, counts = [], [], []
    for group, full in _with_full_attention(shots):
        masses.append(_masses(group, shots[0].spans, len(shots)))
        if shots[0].packed is not None:
            counts.append(_count_packed(group, shots))
        if full is not None:
            shares.append((coverage(full, [group]), selection_recall(full, [group])))
            tables.add(full, masses[-1][1], [group])
    columns, by_full, counted = (
        tuple(torch.cat(column, 1) for column in zip(*parts, strict=True)) for parts in (masses, shares, counts)
    )
    packed = shots[0].packed
    return columns, by_full, None if packed is None else _saved(packed, *counted)


def _with_full_attention(shots: list[Snapshot]) -> Iterator[tuple[Attended, torch.Tensor | None]]:
    """Yield the attention of some layers and their full attention [l, H_kv, T, G, n], None: keys are not kept; then
    those of the next layers. The next full attention overwrites the one before it."""
    attention, start = None if shots[0].shadow is None else FullAttention(shots), 0
    for group in layer_parts(shots):
        count = len(group.role) // len(shots)
        yield group, None if attention is None else attention.layers(start, count)
        start += count


def _masses(group: Attended, spans: int, steps: int) -> tuple[torch.Tensor, ...]:
    """Mass by role [T, l, Hq, R] and by span [T, l, Hq, S], entropy in nats [T, l, Hq], attended tokens and coarse
    entries [T, l, H_kv]. What a mean value makes of the output, and a sink logit's share, have a role and no span."""
    p = group.weights if group.share is None else group.weights * group.share[..., None]
    role = group.role.long()
    by_role = p.new_zeros(*p.shape[:3], FREE + 1).scatter_add_(-1, role[:, :, None].expand_as(p), p)
    by_span = p.new_zeros(*p.shape[:3], spans).scatter_add_(-1, group.span.long()[:, :, None].expand_as(p), p)
    if group.share is not None:
        by_role[..., ROLE["mean"]] = 1 - group.share
    if group.sink is not None:
        by_role[..., ROLE["mean"]] += group.sink if group.share is None else group.sink * group.share
    entropy = torch.special.entr(group.weights).sum(-1)
    by_query_head = (by_role.flatten(1, 2), by_span.flatten(1, 2), entropy.flatten(1, 2))
    return tuple(x.unflatten(0, (steps, -1)) for x in (*by_query_head, *_attended(group)))


def masses_of_all(shots: list[Snapshot]) -> tuple[torch.Tensor, ...]:
    """As `_masses`, of steps whose heads attended all positions exactly. The last step's table serves all: a token's
    span does not change where the memory keeps every token. The weights of one layer exist at a time: those of all
    layers would be the largest tables of a long run's step. The columns are made before the first layer: a column that
    is made between two layers takes a piece of the room that the next weights need, and the process grows."""
    table, attention = shots[-1].groups[0], FullAttention(shots)
    size, codes = (len(shots), *table.weights.shape[:3]), (table.role[0, 0].long(), table.span[0, 0].long())
    coding = Coding(codes, (FREE + 1, shots[0].spans))
    by_role, by_span = (table.weights.new_empty(*size, number) for number in (FREE + 1, shots[0].spans))
    entropy = table.weights.new_empty(size)
    for layer in range(size[1]):
        weights, nats = attention.layer(layer)
        by_role[:, layer], by_span[:, layer] = coding.sums(weights.transpose(0, 1))
        entropy[:, layer] = nats.transpose(0, 1)
    by_role, by_span, entropy = (column.flatten(2, 3) for column in (by_role, by_span, entropy))
    counts = torch.tensor([shot.groups[0].role.shape[-1] for shot in shots], device=entropy.device)
    tokens = counts[:, None, None].expand(-1, *table.role.shape[:2])
    return by_role, by_span, entropy, tokens, torch.zeros_like(tokens)


def _attended(group: Attended) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and coarse entries [T * l, H_kv] that some query head of the KV head attends."""
    is_attended = group.role != FREE if group.visible is None else group.visible.any(2)
    coarse = (is_attended & (group.role == ROLE["coarse"])).sum(-1)
    return is_attended.sum(-1) - coarse, coarse


def sketch(shot: Snapshot) -> tuple[np.ndarray, np.ndarray | None]:
    """Of one step alone, for whoever watches: attended tokens [L, H_kv], and coverage [L, Hq] where all keys are kept.
    What is recorded is measured with other steps, and may differ from this in the last bits."""
    tokens = torch.cat([_attended(group)[0] for group in shot.groups])
    coverages = None
    if shot.shadow is not None and shot.keys is not None:
        coverages = np.ones(shot.q.shape[:2], np.float32)
    elif shot.shadow is not None:
        parts = [coverage(full, [group]) for group, full in _with_full_attention([shot]) if full is not None]
        coverages = torch.cat(parts, 1)[0].numpy(force=True).astype(np.float32)
    return tokens.numpy(force=True).astype(float), coverages


def _count_packed(group: Attended, shots: list[Snapshot]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many packed keys and packed values are attended [T, l, H_kv]."""
    is_quantised = group.role == ROLE["quantised"]
    if group.visible is not None:
        is_quantised &= group.visible.any(2)
    until = torch.tensor([s.packed.values_until for s in shots if s.packed is not None], device=is_quantised.device)
    is_quantised, position = (x.unflatten(0, (len(shots), -1)) for x in (is_quantised, group.position))
    values = (is_quantised & (position < until[:, None, None, None])).sum(-1)
    return is_quantised.sum(-1), values


def _saved(packed: PackedReads, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the bytes [T, L, H_kv] that packed keys and values save in reading; keys, values: their numbers."""
    each = torch.tensor(packed.saved, dtype=torch.float64, device=keys.device)
    return (keys * each[..., 0] + values * each[..., 1]).round().long()


def _zoom_columns(zooms: list[Zooms]) -> dict[str, torch.Tensor]:
    fine, hot, zoomable = (torch.stack([getattr(zoom, name) for zoom in zooms]) for name in ("fine", "hot", "zoomable"))
    zoomed = (fine & hot & zoomable[:, :, :, None]).sum(-1).float()
    possible = zoomable.sum(-1)[..., None].float()
    zoomed = torch.where(possible > 0, zoomed, torch.nan)
    rate = zoomed / possible.clamp(min=1)
    return {"n_zoomed": zoomed.flatten(2, 3), "zoom_rate": rate.flatten(2, 3)}


def _scores(shots: list[Snapshot], top: int) -> list[Scores | None]:
    """The `top` best candidates of every (layer, KV head); None where no layer ranked anything."""
    layers = [i for i, ranked in enumerate(shots[0].ranked) if ranked is not None]
    if not layers:
        return [None] * len(shots)
    all_ranked = [ranked for shot in shots for ranked in shot.ranked if ranked is not None]
    wishes = max(ranked.requested.shape[1] for ranked in all_ranked)
    score = torch.stack([ranked.score.float() for ranked in all_ranked])
    requested = torch.stack(
        [F.pad(ranked.requested, (0, wishes - ranked.requested.shape[1]), value=-1) for ranked in all_ranked]
    )
    is_scored = score.isfinite()
    best = score.masked_fill(~is_scored, -math.inf).topk(min(top, score.shape[-1]), -1)
    listed = is_scored.gather(-1, best.indices)
    is_requested = _members(requested, is_scored)
    read = [torch.zeros_like(is_scored[0]) if ranked.chosen is None else ranked.chosen for ranked in all_ranked]
    is_requested |= torch.stack(read)
    columns = (
        (torch.where(listed, best.indices, -1).int(), -1),
        (best.values.masked_fill(~listed, math.nan), math.nan),
        (is_requested.gather(-1, best.indices) & listed, False),
        (is_scored.sum(-1).int(), 0),
    )
    whole = []
    for column, filling in columns:
        parts = column.unflatten(0, (len(shots), -1))
        out = parts.new_full((len(shots), len(shots[0].ranked), *parts.shape[2:]), filling)
        out[:, layers] = parts
        whole.append(out.numpy(force=True))
    return [Scores(*(column[t] for column in whole)) for t in range(len(shots))]


def _members(requested: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Which spans are wished for: requested [N, H_kv, W] ids, -1 = none -> bool [N, H_kv, S]."""
    padded = torch.zeros(*like.shape[:-1], like.shape[-1] + 1, dtype=torch.bool, device=like.device)
    padded.scatter_(-1, torch.where(requested >= 0, requested, like.shape[-1]), True)
    return padded[..., :-1]
