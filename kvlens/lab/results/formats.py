"""What a method holds where KV is stored in 16 bits, beside the float32 shares of the quality tables.

A share of full KV depends on the number format of both. Keys and values shrink with the format, codes of few bits,
indices and tables do not. `kvlens.lab.studies.kv_formats` measures the 16-bit shares.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

WIDE, NARROW = "float32", "bfloat16"
"""number formats of the tables' runs, and of the shares beside them"""
TITLES = ("resident, of float32 KV", "resident, of 16-bit KV")
"""columns of the tables"""
UNKNOWN = "—"


Place = tuple[int, str, str, str | None]
"""(tokens, method, budget, preset that was asked for)"""


@cache
def narrow_shares(model: str) -> dict[Place, dict[str, Any]]:
    """Return what was measured in 16 bits; {} for a model without such a measurement. A line whose preset is not that
    of the file names it: `requested_preset`."""
    path = Path(__file__).with_name(f"formats-{model}.json")
    if not path.is_file():
        return {}
    measured = json.loads(path.read_text(encoding="utf-8"))
    presets, lines = measured["about"]["presets"], {}
    for line in measured["lines"]:
        method = line["method"]
        preset = line.get("requested_preset", presets.get(method))
        lines[line["length"], method, line["budget"], preset] = line
    return lines


def narrow_share(model: str, length: int | None, method: str, budget: str, preset: str | None) -> float | None:
    """Return the peak as a share of full KV in 16 bits; None where it was not measured, or the budget refuses it.
    preset: that the figure beside it was asked for with."""
    line = narrow_shares(model).get((length or 0, method, budget, preset), {})
    share: float | None = line.get("resident_share")
    return share


def narrow_cell(model: str, length: int | None, method: str, budget: str, preset: str | None) -> str:
    """Return a table's cell: the share, what the method needs where the budget refuses it, or a dash."""
    line = narrow_shares(model).get((length or 0, method, budget, preset), {})
    if "needs" in line:
        return f"infeasible, needs {line['needs']:.1%}"
    return f"{line['resident_share']:.1%}" if "resident_share" in line else UNKNOWN
