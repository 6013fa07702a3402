"""Which heads of a model look back to where they have read the same before: a map that several methods divide heads by.

`kvlens calibrate heads` makes it. Shapes: L layers, Hq query heads, H_kv KV heads, G = Hq / H_kv.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from kvlens.methods.modelfigures import Calibration, Content
from kvlens.refusal import Refusal
from kvlens.shape import KVShape

MAKER = "heads"
"""`kvlens calibrate MAKER`, and what its files say they calibrate"""
SHIPPED = Path(__file__).parent
Head = tuple[int, int]
"""layer, KV head"""


@dataclass(frozen=True)
class HeadMap:
    """Shares of attention, 0 to 1, [L][Hq] each: two on a text of drawn tokens that is read several times, one on
    needle prompts."""

    echo: list[list[float]]
    """on earlier copies of the token itself"""
    induction: list[list[float]]
    """on the tokens that came after its earlier copies"""
    needle: list[list[float]] | None = None
    """on the answer's tokens in the prompt, while the answer is copied; None: a map made without"""

    def best(self, kind: str, share: float, group: int) -> list[Head]:
        """The KV heads of the model with the largest score of a kind, `share` of all, rounded up: the largest of their
        query heads counts; the earlier one first among equals."""
        ranked = self.ranked(kind, group)
        return ranked[: head_count(share, len(ranked))]

    def ranked(self, kind: str, group: int) -> list[Head]:
        """All KV heads of the model, in the order of `best`."""
        rows: list[list[float]] = getattr(self, kind)
        scored = [
            (-max(row[head * group : (head + 1) * group]), layer, head)
            for layer, row in enumerate(rows)
            for head in range(len(row) // group)
        ]
        return [(layer, head) for _, layer, head in sorted(scored)]


def head_count(share: float, heads: int) -> int:
    """How many of a model's KV heads a share is."""
    return min(heads, ceil(share * heads))


def head_map(
    needed: Callable[[Any], bool], otherwise: str, needle: Callable[[Any], bool] = lambda params: False
) -> Calibration:
    """What a method announces that divides heads by the map; its parameter `calibration` names the file. needle:
    whether these parameters ask for scores of needle prompts, which a map may lack."""

    def accept(found: Content, params: Any, shape: KVShape) -> HeadMap:
        return _accept(found, shape, needle(params))

    shipped = {"demo": SHIPPED / "heads_demo.json", "smollm2": SHIPPED / "heads_smollm2.json"}
    return Calibration(
        "retrieval heads",
        "calibration",
        {model: path for model, path in shipped.items() if path.is_file()},
        "kvlens calibrate heads --model {model} --out FILE",
        otherwise,
        needed,
        accept,
        maker=MAKER,
    )


def _accept(found: Content, shape: KVShape, needle: bool) -> HeadMap:
    """Raises ValueError with one sentence where a score is missing."""
    if needle and "needle" not in found.figures:
        raise Refusal(
            f"'{found.name}' has no scores of needle prompts: run `kvlens calibrate heads --model "
            f"{found.provenance.get('model', 'M')} --out FILE` and set calibration to the file it writes.",
            code="needle_scores_missing",
        )
    kinds = [kind for kind in ("echo", "induction", "needle") if kind in found.figures or kind != "needle"]
    scores = {kind: [[float(x) for x in row] for row in found.figures[kind]] for kind in kinds}
    for rows in scores.values():
        if [len(row) for row in rows] != [shape.q_heads] * shape.layers:
            raise Refusal(
                f"'{found.name}' does not have a score for every query head of every layer.", code="scores_missing"
            )
    return HeadMap(**scores)
