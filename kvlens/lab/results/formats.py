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


@cache
def narrow_shares(model: str) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Return what was measured in 16 bits by (length, method, budget); {} for a model without such a measurement."""
    path = Path(__file__).with_name(f"formats-{model}.json")
    if not path.is_file():
        return {}
    lines = json.loads(path.read_text(encoding="utf-8"))["lines"]
    return {(line["length"], line["method"], line["budget"]): line for line in lines}


def narrow_share(model: str, length: int | None, method: str, budget: str) -> float | None:
    """Return the peak as a share of full KV in 16 bits; None where it was not measured, or the budget refuses it."""
    line = narrow_shares(model).get((length or 0, method, budget), {})
    share: float | None = line.get("resident_share")
    return share


def narrow_cell(model: str, length: int | None, method: str, budget: str) -> str:
    """Return a table's cell: the share, what the method needs where the budget refuses it, or a dash."""
    line = narrow_shares(model).get((length or 0, method, budget), {})
    if "needs" in line:
        return f"infeasible, needs {line['needs']:.1%}"
    return f"{line['resident_share']:.1%}" if "resident_share" in line else UNKNOWN
