"""Shares of full KV name the number format that they are of; the quality tables have them for float32 and 16 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlens.app.figures.quality import table
from kvlens.lab.bench.qualitypage import markdown
from kvlens.lab.results import formats
from kvlens.lens.knob import limit_with_format
from kvlens.lens.listing import Search
from kvlens.lens.runlist import search_runs
from kvlens.meta import RunMeta
from kvlens.text.units import full_kv
from tests.synthetic import write_synthetic

SIZES: dict[str, Any] = {"layers": 1, "q_heads": 1, "kv_heads": 1}
MEASURED = [
    {"length": 512, "method": "snapkv", "budget": "20%", "preset": "paper", "resident_share": 0.1999},
    {"length": 512, "method": "kivi", "budget": "20%", "needs": 0.2135},
    {"length": 512, "method": "quest", "budget": "20%", "refused": "no"},
]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Name of a model with 16-bit shares."""
    monkeypatch.setattr(formats, "__file__", str(tmp_path / "formats.py"))
    (tmp_path / "formats-toy.json").write_text(json.dumps({"lines": MEASURED}))
    formats.narrow_shares.cache_clear()
    yield "toy"
    formats.narrow_shares.cache_clear()


def test_a_share_is_of_a_number_format() -> None:
    assert [full_kv(dtype) for dtype in ("float32", None)] == ["full KV in float32", "full KV"]
    held = {"budget": "0.2", "budget_bytes": 10, "dtype": "bfloat16"}
    assert limit_with_format(RunMeta(**SIZES, method="snapkv", **held)) == "20% of full KV in bfloat16"
    assert limit_with_format(RunMeta(**SIZES, method="snapkv", **(held | {"budget": "10B"}))) == "10 B"
    assert limit_with_format(RunMeta(**SIZES, method="full", dtype="float32")) == "no limit"


def test_a_list_of_runs_has_the_number_format(tmp_path: Path) -> None:
    write_synthetic(tmp_path, 1, 1, 1, 4, 8, dtype="bfloat16")
    assert search_runs(tmp_path, Search())["dtype"].tolist() == ["bfloat16"]


def test_cells_of_sixteen_bits(measured: str) -> None:
    cells = [formats.narrow_cell(measured, 512, name, "20%") for name in ("snapkv", "kivi", "quest", "full")]
    assert cells == ["20.0%", "infeasible, needs 21.3%", formats.UNKNOWN, formats.UNKNOWN]
    shares = [formats.narrow_share(measured, length, "snapkv", "20%") for length in (512, 1024, None)]
    assert shares == [0.1999, None, None]
    assert formats.narrow_shares("no such model") == {}


def test_quality_rows_have_both_shares(measured: str) -> None:
    line = {"task": "t", "budget": "20%", "n": 4, "infeasible": 0, "rule": "resident bytes", "presets": {"paper": 4}}
    line |= {"exact": 1.0, "low": 0.5, "high": 1.0, "smallest_feasible": None}
    rows = [line | {"method": name, "resident_share": share} for name, share in (("kivi", 0.122), ("snapkv", 0.2))]
    rows.append(line | {"method": "full", "dtype": "bfloat16", "budget": "", "resident_share": 1.03})
    frame = table(rows, measured, 512).set_index("method")
    assert frame["kv_format"].tolist() == ["float32", "float32", "bfloat16"]
    assert frame["resident_share_16bit"].tolist()[1:] == [0.1999, 1.03]
    assert frame["resident_share_16bit"].isna().tolist() == [True, False, False]
    request = {"tasks": ["t"], "model": measured, "length": 512}
    machine = {"processor": "P", "cores": 1}
    about = {"request": request, "trials": 3, "planned": 3, "date": "d", "machine": machine, "torch": "2"}
    text = markdown({"about": about | {"transformers": "5"}, "lines": rows}).splitlines()
    columns = [cell.strip() for cell in text[0].split("|")]
    places = [columns.index(title) for title in formats.TITLES]
    cells = [[line.split("|")[place].strip() for place in places] for line in text[2:5]]
    assert cells == [["12.2%", "infeasible, needs 21.3%"], ["20.0%", "20.0%"], [formats.UNKNOWN, "103.0%"]]
