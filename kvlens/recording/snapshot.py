"""What steps looked like: what the engine's thread freezes and what measuring makes of it.

Shapes: T steps, L layers, Hq query heads, H_kv KV heads, G = Hq / H_kv, C slots, S span ids, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from kvlens.decisions import Decisions
from kvlens.instruments import Oracle, Scores
from kvlens.kernels.attend import LayerForm
from kvlens.memory.placement import Selection
from kvlens.tiers.slots import FREE


@dataclass
class Attended:
    """The attention of some layers, frozen: weights [l, H_kv, G, C] and what each slot held, role, span, position [l,
    H_kv, C]."""

    weights: torch.Tensor
    """[l, H_kv, G, C]; empty if `Snapshot.keys` is given: the weights are computed from these keys later"""
    visible: torch.Tensor | None
    """bool [l, H_kv, G, C]: slots that the query head could attend; None: all"""
    role: torch.Tensor
    span: torch.Tensor
    position: torch.Tensor
    share: torch.Tensor | None = None
    """[l, H_kv, G]: how much of the output these weights make, the rest is a mean value; None: all of it"""
    sink: torch.Tensor | None = None
    """[l, H_kv, G]: the share that a sink logit takes, which has no key; None: there is no such logit"""
    summarised: torch.Tensor | None = None
    """bool [l, H_kv, G, P]: positions that summaries stand for; None: all of the summary's span"""


@dataclass
class Zooms:
    """What each layer could and did read token by token: fine, hot [L, H_kv, G|1, S], zoomable [L, H_kv, S], all
    bool."""

    fine: torch.Tensor
    hot: torch.Tensor
    zoomable: torch.Tensor


@dataclass(frozen=True)
class Ranked:
    """How one layer ranked spans: score [H_kv, S], NaN = no candidate; requested [H_kv, W] span ids, -1 = none."""

    score: torch.Tensor
    requested: torch.Tensor
    chosen: torch.Tensor | None = None
    """bool [H_kv, S], where nothing has to be brought: spans that a query head reads; None: those of `requested`"""


@dataclass(frozen=True)
class PackedReads:
    """What packed tokens save a step in reading, per KV head."""

    saved: Sequence[Sequence[tuple[float, float]]]
    """by layer and KV head: bytes of a packed key less than of an exact one, and of a value"""
    values_until: int
    """positions below it have packed values"""


@dataclass(frozen=True)
class DecidedStep:
    """What the layers of a step decided, and what was on the device when they attended."""

    selections: Sequence[Selection | None]
    """per layer; None: everything on the device is attended"""
    hot: torch.Tensor
    """bool [L, H_kv, S]: spans whose tokens were in slots"""
    refused: Sequence[np.ndarray]
    """int64 [3, n] each: layer, KV head and span of what had no room"""


@dataclass
class LayerInputs:
    """One layer's decision, as the session showed it."""

    layer: int
    """the model's number"""
    q: torch.Tensor
    biases: Sequence[torch.Tensor | None]
    scaling: float
    selection: Selection | None
    frozen: tuple[Attended, torch.Tensor] | None = None
    """taken at once where the slots are copies, or about to be overwritten, in the background or by a later layer: the
    attention, and which spans were hot"""


class LayerKeys(Protocol):
    """Keys [L, H_kv, n, D], as one tensor or in parts."""

    @property
    def shape(self) -> torch.Size: ...


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
    shadow: LayerKeys | None
    """keys of all positions so far [L, H_kv, n, D]"""
    scaling: float
    spans: int
    owner: torch.Tensor | None = None
    """int64 [>= n]: the span of each position; where the step is sampled for full attention by span"""
    sampled: tuple[int, ...] = ()
    """layers whose full attention by span is logged"""
    reference: torch.Tensor | None = None
    """float32 [l, H_kv, G, n]: full KV's own attention in the sampled layers; None: not recorded"""
    entry_bytes: int = 0
    """keys and values of one entry of one KV head"""
    packed: PackedReads | None = None
    """None: nothing lies packed"""
    decided: DecidedStep | None = None
    """None: no layer decided anything"""
    index_bytes: tuple[int, ...] = ()
    """per layer: what of the method's index was read for one KV head's choice"""
    forms: tuple[LayerForm, ...] = ()
    """what each layer's attention has besides scaled scores; (): nothing"""
    keys: torch.Tensor | None = None
    """[L, H_kv, n, D], where every query head attended all positions exactly and no slot changes any more: the keys in
    the slots, in the order of positions. The weights are made of them later; None: they are in `groups`"""


@dataclass
class Measured:
    """One step. head: columns [L, Hq]; kv: columns [L, H_kv]; top_span, top_mass [L, Hq, K]: the spans with most mass,
    -1 = none; tail_mass [L, Hq]: mass on the others; worst: largest |sum of masses - 1|; oracle_worst: the same of full
    attention by span."""

    head: dict[str, np.ndarray]
    kv: dict[str, np.ndarray]
    top_span: np.ndarray
    top_mass: np.ndarray
    tail_mass: np.ndarray
    scores: Scores | None
    worst: float
    oracle: Oracle | None = None
    oracle_worst: float = 0.0
    decisions: Decisions | None = None


def rank(selection: Selection) -> Ranked | None:
    """Return how a layer ranked spans; None: it ranked nothing."""
    if selection.score is None:
        return None
    brings = selection.requested.shape[1] > 0
    return Ranked(selection.score, selection.requested, None if brings else selection.fine.any(1))


def join(parts: list[Attended]) -> Attended:
    """Join the parts of one layer: KV heads that have fewer slots than others are filled up with slots that hold
    nothing and are not attended."""
    widest = max(part.role.shape[-1] for part in parts)

    def wide(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return F.pad(tensor, (0, widest - tensor.shape[-1]), value=value)

    return Attended(
        torch.cat([wide(part.weights, 0.0) for part in parts], 1),
        torch.cat([wide(_visible(part), False) for part in parts], 1),
        torch.cat([wide(part.role, FREE) for part in parts], 1),
        torch.cat([wide(part.span, 0) for part in parts], 1),
        torch.cat([wide(part.position, -1) for part in parts], 1),
        None if parts[0].share is None else torch.cat([part.share for part in parts if part.share is not None], 1),
        None if parts[0].sink is None else torch.cat([part.sink for part in parts if part.sink is not None], 1),
        None
        if parts[0].summarised is None
        else torch.cat([part.summarised for part in parts if part.summarised is not None], 1),
    )


def _visible(part: Attended) -> torch.Tensor:
    return torch.ones_like(part.weights, dtype=torch.bool) if part.visible is None else part.visible
