"""From what layers selected to rows of decisions. Runs on the recorder's second thread; changes nothing.

Shapes: l layers, H_kv KV heads, G query heads of a KV head, S span ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from kvlens.decisions import DECISION_KINDS, NONE, Decisions
from kvlens.memory.placement import Selection
from kvlens.recording.snapshot import DecidedStep

_CORRECTION = DECISION_KINDS.index("correction")


def decisions_at(step: DecidedStep) -> Decisions | None:
    """Return what the layers decided at a step, in the order of layers; None if none of them chose."""
    parts = []
    for kind, run in groupby(enumerate(step.selections), key=lambda pair: _signature(pair[1])):
        layers, members = zip(*run, strict=True)
        if kind is not None:
            parts.append(_decided(step, slice(layers[0], layers[-1] + 1), members))
    return Decisions.joined(parts)


def zoom_columns(decisions: Decisions | None, layers: int, q_heads: int) -> dict[str, np.ndarray]:
    """Return zoom_asked and zoom_refused, float32 [layers, q_heads], NaN where a query head had nothing to zoom."""
    columns = {name: np.full((layers, q_heads), np.nan, np.float32) for name in ("zoom_asked", "zoom_refused")}
    if decisions is not None:
        zooms = decisions.kind == DECISION_KINDS.index("zoom")
        place = decisions.layer[zooms], decisions.q_head[zooms]
        columns["zoom_asked"][place], columns["zoom_refused"][place] = (
            decisions.requested[zooms],
            decisions.refused[zooms],
        )
    return columns


def _signature(selection: Selection | None) -> tuple[object, ...] | None:
    """Neighbouring layers with an equal one are read together; None: the layer chose nothing."""
    if selection is None:
        return None
    tables = (selection.rows, selection.positions, selection.now, selection.zoomable, selection.gate, selection.score)
    widths = (selection.fine.shape, selection.requested.shape, None if selection.rows is None else selection.rows.shape)
    zoomable = None if selection.zoomable is None else selection.zoomable.dim()
    return (*(table is None for table in tables), *widths, zoomable, selection.cause)


def _decided(step: DecidedStep, layers: slice, members: Sequence[Selection]) -> Decisions:
    example = members[0]
    if example.rows is not None:
        rows = torch.stack([s.rows for s in members if s.rows is not None])
        tokens = rows >= 0
        if example.positions is not None:  # some tokens on the device may stay unread
            read = torch.stack([s.positions for s in members if s.positions is not None]).any(2)
            tokens &= read.gather(-1, rows.clamp(min=0))
        return _of_tokens(layers, "recall", tokens)
    if example.positions is not None:
        tokens = torch.stack([s.positions for s in members if s.positions is not None]).any(2)
        return _of_tokens(layers, "selection", tokens)
    return _of_spans(step, layers, members)


def _of_tokens(layers: slice, kind: str, tokens: torch.Tensor) -> Decisions:
    """tokens bool [l, H_kv, n]: which were asked for. All were there when the layer attended."""
    requests = tokens.sum(-1).numpy(force=True)
    layer, kv_head = (place.ravel() for place in np.indices(requests.shape))
    columns = {
        "layer": layer + layers.start,
        "kv_head": kv_head,
        "requested": requests.ravel(),
        "granted": requests.ravel(),
    }
    return Decisions.filled(requests.size, kind, "tokens", columns)


def _of_spans(step: DecidedStep, layers: slice, members: Sequence[Selection]) -> Decisions:
    example, hot = members[0], step.hot[layers]
    fine = torch.stack([s.fine for s in members])
    score = (
        torch.stack([s.score.float() for s in members if s.score is not None]) if example.score is not None else None
    )
    candidates = None if score is None else score.isfinite().sum(-1, keepdim=True)
    kind = "selection"
    if example.zoomable is not None:
        kind = "zoom"
        zoomable = torch.stack([s.zoomable.expand(hot.shape[1:]) for s in members if s.zoomable is not None])
        requests = fine & zoomable[:, :, None]
        granted = requests & hot[:, :, None]
        candidates = zoomable.sum(-1, keepdim=True).expand(fine.shape[:3])
    elif example.requested.shape[1]:
        kind = "recall"
        requests = _members(torch.stack([s.requested for s in members]), hot)[:, :, None]
        granted = requests & (fine.any(2) & hot)[:, :, None]
    else:
        requests = granted = fine.any(2, keepdim=True)
    without_room = torch.zeros_like(hot)
    for units in step.refused:
        layer, head, span = torch.from_numpy(units[:, (units[0] >= layers.start) & (units[0] < layers.stop)]).to(
            hot.device
        )
        without_room[layer - layers.start, head, span] = True
    refused = requests & ~granted & without_room[:, :, None]
    missed = requests & ~granted & ~without_room[:, :, None]
    figures = _gates(members) if example.gate is not None else _ranks(score, requests)
    size = requests.shape[:3]
    layer, kv_head, member = (place.ravel() for place in np.indices(tuple(size)))
    columns: dict[str, np.ndarray | float] = {
        "layer": layer + layers.start,
        "kv_head": kv_head,
        "q_head": kv_head * size[2] + member if kind == "zoom" else NONE,
        "candidates": NONE if candidates is None else _flat(candidates),
        "score": _flat(figures[0]),
        "cut": _flat(figures[1]),
        "refused_span": refused.flatten(0, 2).nonzero()[:, 1].numpy(force=True),
        "missed_span": missed.flatten(0, 2).nonzero()[:, 1].numpy(force=True),
    }
    counts = {"requested": requests, "granted": granted, "refused": refused, "missed": missed}
    columns |= {name: _flat(mask.sum(-1)) for name, mask in counts.items()}
    decisions = Decisions.filled(len(layer), kind, "spans", columns)
    if kind == "recall" and example.now is not None and example.cause == "correction":
        corrected = torch.stack([s.now for s in members if s.now is not None])
        decisions.kind[_flat(corrected).astype(bool)] = _CORRECTION
    return decisions


def _gates(members: Sequence[Selection]) -> tuple[torch.Tensor, torch.Tensor]:
    gates = [s.gate for s in members if s.gate is not None]
    score = torch.stack([gate.score.float() for gate in gates])
    return score, torch.stack(
        [torch.as_tensor(gate.cut, device=score.device).expand(score.shape[1:]) for gate in gates]
    )


def _ranks(score: torch.Tensor | None, requests: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest score that was left out and the lowest that was taken [l, H_kv], NaN where there is none.
    score [l, H_kv, S]; requests bool [l, H_kv, 1, S]."""
    if score is None:
        none = torch.full(requests.shape[:2], torch.nan)
        return none, none
    finite, members = score.isfinite(), requests[:, :, 0]
    highest = score.masked_fill(~finite | members, -torch.inf).amax(-1)
    lowest = score.masked_fill(~finite | ~members, torch.inf).amin(-1)
    return highest.masked_fill(highest.isinf(), torch.nan), lowest.masked_fill(lowest.isinf(), torch.nan)


def _members(requested: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return which spans are requested: int64 [l, H_kv, W] ids, -1 = none -> bool as `like` [l, H_kv, S]."""
    padded = torch.zeros(*like.shape[:-1], like.shape[-1] + 1, dtype=torch.bool, device=like.device)
    return padded.scatter_(-1, torch.where(requested >= 0, requested, like.shape[-1]), True)[..., :-1]


def _flat(values: torch.Tensor) -> np.ndarray:
    return values.numpy(force=True).ravel()
