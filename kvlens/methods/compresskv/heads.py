"""CompressKV's offline figures of a model: scores of its query heads and errors of its layers, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlens import REPOSITORY
from kvlens.calibrate.provenance import read
from kvlens.methods.compresskv.params import HEADS, CompressKVParameters
from kvlens.shape import KVShape

SHIPPED = REPOSITORY / "kvlens" / "demo" / "compresskv.json"


@dataclass(frozen=True)
class Calibration:
    """L layers, Hq query heads."""

    scores: dict[str, list[list[float]]]
    """kind of head (HEADS without 'all') -> [L][Hq]"""
    errors: list[float]
    """[L], shares that add up to 1 (eq. 4)"""
    chance: float | None
    """semantic retrieval score of a head that attends all tokens alike; None: the file does not say"""


def load(params: CompressKVParameters, shape: KVShape, model_name: str) -> Calibration | None:
    """The figures the parameters ask for; None when they ask for none. Raises ValueError with one sentence."""
    if not params.calibrated:
        return None
    if not params.calibration and model_name != "demo":
        raise ValueError(
            f"compresskv has no calibration for '{model_name}': run `kvlens calibrate compresskv --model "
            f"{model_name}` and set "
            "calibration=FILE, or set heads=all and layers=equal."
        )
    path = Path(params.calibration).expanduser() if params.calibration else SHIPPED
    found = read(path, "compresskv", shape.layers, shape.q_heads)
    try:
        scores = {kind: [[float(x) for x in row] for row in found["scores"][kind]] for kind in HEADS if kind != "all"}
        errors = [float(x) for x in found["layer_error"]]
        chance = float(found["srh_chance"]) if "srh_chance" in found else None
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"'{path.name}' is not a calibration made by `kvlens calibrate compresskv`.") from None
    complete = len(errors) == shape.layers and min(errors) >= 0
    for rows in scores.values():
        complete = (
            complete and len(rows) == shape.layers and all(len(row) == shape.q_heads and min(row) >= 0 for row in rows)
        )
    if not complete:
        raise ValueError(
            f"'{path.name}' does not have a score for every query head and an error for every layer, all at least 0."
        )
    return Calibration(scores, errors, chance)


def chosen(scores: Sequence[float] | None, q_heads: int, count: int, unscored: str) -> list[int]:
    """Query heads that choose a layer's tokens: the `count` best by score, the lower index first among equals; all of
    them without scores, and, unless `unscored` is 'first', where no head has any."""
    everyone = list(range(q_heads))
    if scores is None or (unscored == "all" and max(scores) == 0):
        return everyone
    return sorted(sorted(everyone, key=lambda head: (-scores[head], head))[:count])
