"""Where a player opens a run: the step, the head and the span that explain most."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvlens.lens.verdict import Verdict
from kvlens.player.lens import worst_regret
from kvlens.recording.metrics import REGRETS, metric_of
from kvlens.store.reader import TraceReader

#: The metric a player opens with: the first of these that the run recorded.
PREFERRED = ("zoom_rate", "n_zoomed", "coverage", "mass_resident", "mass_window", "entropy")


@dataclass(frozen=True)
class Place:
    """What a player shows of a run."""

    step: int = 0
    layer: int = 0
    head: int = 0
    """query head"""
    span: int | None = None
    """None: no span is selected"""
    metric: str | None = None
    """None: the run recorded no metric per step and head"""


def opening_metric(names: list[str]) -> str | None:
    """Return the metric to show if the user chose none."""
    return next((name for name in PREFERRED if name in names), names[0] if names else None)


def opening(reader: TraceReader, names: list[str], found: Verdict | None, wanted: str | None = None) -> Place:
    """Return the place at which to open a run.

    A run with a loss opens at the step of loss, with the head and the span missed most. A run without a loss opens at
    the step, head and span of most regret, otherwise at step 0 and the head with the largest mean of the metric.
    `names`: the metrics of the run. `found`: its verdict. `wanted`: the metric that the user requested."""
    if found is None and (place := held_place(reader)) is not None:
        return replace(place, metric=_regret_first(names))
    metric = _regret_first(names)
    if found is None and wanted is None and metric in REGRETS and (worst := worst_regret(reader)) is not None:
        return Place(worst["step"], worst["layer"], worst["head"], worst["span"], metric)
    if found is None:
        metric = wanted if wanted in names else opening_metric(names)
        return Place(0, *strongest_head(reader, metric), None, opening_metric(names))
    if (missed := found.missed) is None:
        return Place(found.step, *strongest_head(reader, metric), None, metric)
    return Place(found.step, missed.layer, missed.q_head, missed.span, metric)


def _regret_first(names: list[str]) -> str | None:
    return next((name for name in REGRETS if name in names), opening_metric(names))


def held_place(reader: TraceReader) -> Place | None:
    """Return the place to look at in a run with a held or dropped span, None for other runs.

    The step is the step of loss of the run that this run repeats, or the step that a drop changed most. The head is
    the query head whose full attention gives the span most mass."""
    holds, tried = (*reader.meta.hold, *reader.meta.drop), reader.meta.whatif
    if not holds or tried is None or (step := tried.step) is None or step >= reader.n_steps:
        return None
    heads = reader.oracle_step(step)
    heads = heads[heads["span"] == holds[0].span]
    if heads.empty:
        layer, kv_head = holds[0].heads[0]
        return Place(step, layer, kv_head * (reader.q_heads // reader.kv_heads), holds[0].span)
    most = heads.iloc[int(np.nanargmax(heads["full"]))]
    return Place(step, int(most["layer"]), int(most["q_head"]), holds[0].span)


def strongest_head(reader: TraceReader, metric: str | None) -> tuple[int, int]:
    """Return the (layer, query head) with the largest mean of a metric; (0, 0) if the metric has no query heads."""
    if metric is None or metric_of(metric).level != "q":
        return 0, 0
    means = reader.head_summary(metric)
    if not np.isfinite(means).any():
        return 0, 0
    layer, head = np.unravel_index(int(np.nanargmax(means)), means.shape)
    return int(layer), int(head)
