"""CompressKV's offline figures of a model: scores of its query heads and errors of its layers, checked. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlens.methods.compresskv.params import HEADS, CompressKVParameters
from kvlens.methods.modelfigures import Calibration, Content, shipped
from kvlens.refusal import Refusal
from kvlens.shape import KVShape

SHIPPED = shipped(Path(__file__).parent)
"""model name -> its figures"""


@dataclass(frozen=True)
class HeadFigures:
    """L layers, Hq query heads."""

    scores: dict[str, list[list[float]]]
    """kind of head (HEADS without 'all') -> [L][Hq]"""
    errors: list[float]
    """[L], shares that add up to 1 (eq. 4)"""
    chance: float | None
    """semantic retrieval score of a head that attends all tokens alike; None: the file does not say"""


def read_figures(found: Content, params: CompressKVParameters, shape: KVShape) -> HeadFigures:
    """The figures of a file. Raises ValueError with one sentence where some are missing."""
    figures = found.figures
    scores = {kind: [[float(x) for x in row] for row in figures["scores"][kind]] for kind in HEADS if kind != "all"}
    errors = [float(x) for x in figures["layer_error"]]
    chance = float(figures["srh_chance"]) if "srh_chance" in figures else None
    complete = len(errors) == shape.layers and min(errors) >= 0
    for rows in scores.values():
        complete = (
            complete and len(rows) == shape.layers and all(len(row) == shape.q_heads and min(row) >= 0 for row in rows)
        )
    if not complete:
        raise Refusal(
            f"'{found.name}' does not have a score for every query head and an error for every layer, all at least 0.",
            code="scores_missing",
        )
    return HeadFigures(scores, errors, chance)


FIGURES = Calibration(
    "head scores",
    "calibration",
    SHIPPED,
    "kvlens calibrate compresskv --model {model} --out FILE",
    "set heads=all and layers=equal, which need none",
    lambda params: params.calibrated,
    read_figures,
)


def choose_heads(scores: Sequence[float] | None, q_heads: int, count: int, unscored: str) -> list[int]:
    """Query heads that choose a layer's tokens: the `count` best by score, the lower index first among equals; all of
    them without scores, and, unless `unscored` is 'first', where no head has any."""
    everyone = list(range(q_heads))
    if scores is None or (unscored == "all" and max(scores) == 0):
        return everyone
    return sorted(sorted(everyone, key=lambda head: (-scores[head], head))[:count])
