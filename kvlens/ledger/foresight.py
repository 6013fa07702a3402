"""Which signal of a step foresees that the step's token is lost: ROC curves and the area under them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvlens.ledger.signals import SIGNALS

DRAWS, LEVEL = 1000, 0.95
"""bootstrap draws of an area's interval, and its level"""
Track = list[dict[str, Any]]
"""the steps of one answer: lost, and a number or None per signal"""


def foresight(tracks: Sequence[Track], draws: int = DRAWS) -> list[dict[str, Any]]:
    """Return per signal the area under its ROC curve for "this step's token is lost", with a bootstrap interval over
    whole answers: signal, n (steps), lost (of these), answers, auc, low, high. An area of .5 foresees nothing."""
    results = []
    for signal in SIGNALS:
        recorded = _recorded(tracks, signal)
        values, lost = _flat(recorded)
        row: dict[str, Any] = {
            "signal": signal,
            "n": len(values),
            "lost": int(lost.sum()),
            "answers": len(recorded),
            "auc": area(values, lost),
        }
        generator, areas = np.random.default_rng(0), []
        for _ in range(draws if recorded else 0):
            drawn = area(*_flat([recorded[place] for place in generator.integers(len(recorded), size=len(recorded))]))
            areas += [] if drawn is None else [drawn]
        tail = (1 - LEVEL) / 2
        low, high = np.quantile(areas, [tail, 1 - tail]).tolist() if areas else (None, None)
        results.append(row | {"low": low, "high": high})
    return results


def roc(tracks: Sequence[Track]) -> pd.DataFrame:
    """Return the ROC curve of every signal over all recorded steps: signal, threshold (a step whose value is at least
    this is called lost; inf: none is), alarms (share of the kept steps that are called lost), caught (share of the lost
    steps), n, lost. Steps of one value are one point. Signals without a lost and a kept step have no rows."""
    frames = []
    for signal in SIGNALS:
        values, lost = _flat(_recorded(tracks, signal))
        if not len(lost) or lost.all() or not lost.any():
            continue
        order = np.argsort(-values, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(values[order]), 1) != 0)  # the last step of each value
        caught, alarms = np.cumsum(lost[order])[ends], np.cumsum(~lost[order])[ends]
        points = {
            "threshold": np.append(np.inf, values[order][ends]),
            "alarms": np.append(0, alarms / alarms[-1]),
            "caught": np.append(0, caught / caught[-1]),
        }
        frames.append(pd.DataFrame({"signal": signal, **points, "n": len(values), "lost": int(lost.sum())}))
    columns = ["signal", "threshold", "alarms", "caught", "n", "lost"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def _recorded(tracks: Sequence[Track], signal: str) -> list[list[tuple[float, bool]]]:
    """(value, lost) of the steps of each answer at which a signal was recorded."""
    pairs = [
        [(float(step[signal]), bool(step["lost"])) for step in track if step.get(signal) is not None]
        for track in tracks
    ]
    return [track for track in pairs if track]


def _flat(tracks: Sequence[Sequence[tuple[float, bool]]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = [pair for track in tracks for pair in track]
    return np.array([value for value, _ in pairs], float), np.array([lost for _, lost in pairs], bool)


def area(values: np.ndarray, lost: np.ndarray) -> float | None:
    """Return the area under the ROC curve: the chance that a lost step has a larger value than a kept one. Ties count
    half (Mann and Whitney 1947). None if all steps are alike."""
    if lost.all() or not lost.any():
        return None
    order = np.sort(values)
    ranks = (np.searchsorted(order, values, "left") + np.searchsorted(order, values, "right") + 1) / 2
    count = int(lost.sum())
    return float((ranks[lost].sum() - count * (count + 1) / 2) / (count * (len(lost) - count)))
