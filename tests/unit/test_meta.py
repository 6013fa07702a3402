"""What a run says of itself: written and read as one typed model, whatever schema its trace is of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pydantic import ValidationError
from store_support import one_sentence
from support import raises_code

from kvlens.meta import RunMeta
from kvlens.metaparts import Counterfactual, Held, Machine, Sampled, Search
from kvlens.store.errors import UnreadableRun
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter
from tests.synthetic import write_synthetic

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {"layers": 2, "q_heads": 4, "kv_heads": 2}
WHOLE = RunMeta(
    **SIZES,
    model="m",
    config={"window": 4, "inner": {"rate": 0.5}},
    needle=((3, 9),),
    oracle=Sampled(every=2, layers=(0, 1)),
    hold=(Held(span=1, tok_start=2, tok_end=5, heads=((0, 1), (1, 0)), from_step=3),),
    whatif=Counterfactual(step=None, restored=True, search=Search(heads=((0, 1),), alone=((0, 1, 0.25),), tried=2)),
    machine=Machine(processor="p", cores=2),
    budget="20%",
    forced=False,
)


def table(path: Path, changes: dict[str, Any]) -> None:
    """Changes keys of a stored meta; a value that is no JSON goes in as it is."""
    with duckdb.connect(str(path)) as con:
        for key, value in changes.items():
            con.execute("DELETE FROM meta WHERE key = $key", {"key": key})
            text = value if isinstance(value, str) else json.dumps(value)
            con.execute("INSERT INTO meta VALUES ($key, $text)", {"key": key, "text": text})


def stored(folder: Path, changes: dict[str, Any]) -> str:
    uid = write_synthetic(folder, 1, 2, 1, 2, 4)
    path = folder / uid / "trace.duckdb"
    path.chmod(0o644)
    table(path, changes)
    return uid


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    writer.begin(WHOLE)
    writer.finish("completed", None, [], {"output_text": "x"})
    with TraceReader.open(tmp_path, writer.uid) as reader:
        assert {name: getattr(reader.meta, name) for name in WHOLE.to_row()} == {
            name: getattr(WHOLE, name) for name in WHOLE.to_row()
        }
        assert (reader.meta.output_text, reader.meta.run_uid) == ("x", writer.uid)
        assert reader.meta.seed is None, "what nobody said was not recorded"


def test_the_keys_of_another_version_are_kept(tmp_path: Path) -> None:
    with TraceReader.open(tmp_path, stored(tmp_path, {"invented_later": [1], "seed": None})) as reader:
        assert reader.meta.to_row()["invented_later"] == [1]
        assert reader.meta.seed is None


def test_a_made_up_run_of_earlier_versions_gave_budget_and_machine_otherwise(tmp_path: Path) -> None:
    uid = stored(tmp_path, {"budget": 0.35, "machine": '"none"', "hold": None, "config": None})
    with TraceReader.open(tmp_path, uid) as reader:
        assert (reader.meta.budget, reader.meta.machine) == ("0.35", Machine(processor="none"))
        assert (reader.meta.hold, reader.meta.config) == ((), {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers", "not json"),
        ("layers", 0),
        ("layers", True),
        ("q_heads", 257),
        ("kv_heads", None),
        ("kv_heads", 3),
        ("budget_bytes", '"much"'),
        ("config", [1]),
        ("hold", [{"span": 1}]),
        ("needle", [[1, 2, 3]]),
        ("whatif", {"search": {"heads": [[0]]}}),
        ("machine", 7),
    ],
)
def test_a_foreign_or_damaged_meta_is_one_sentence(tmp_path: Path, key: str, value: Any) -> None:
    uid = stored(tmp_path, {key: value})
    with raises_code("meta_foreign", UnreadableRun) as refused:
        TraceReader.open(tmp_path, uid)
    one_sentence(refused.value)


@pytest.mark.parametrize("change", [{"kv_heads": None}, {"kv_heads": 3}, {"layers": 0}, {"layers": 300}])
def test_a_run_without_sizes_that_a_trace_can_hold_cannot_begin(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RunMeta.model_validate(SIZES | change)


def test_nobody_looks_a_meta_up_by_a_string() -> None:
    by_string = re.compile(r"\bmeta(?:\.get\(|\[['\"])")
    files = [*ROOT.glob("kvlens/**/*.py"), *ROOT.glob("pages/*.py"), *ROOT.glob("store/*.py")]
    inside = {ROOT / "store" / name for name in ("runinfo.py", "tracefile.py", "versions.py")}
    found = [str(path.relative_to(ROOT)) for path in files if path not in inside and by_string.search(path.read_text())]
    assert found == []


def test_the_page_of_the_trace_names_every_key() -> None:
    page = (ROOT / "docs/trace-schema.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"`(\w+)`", page.split("### Keys of `meta`")[1].split("### ")[0]))
    assert set(RunMeta.model_fields) - keys == set()
