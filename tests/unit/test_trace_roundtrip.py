"""A run that is exported in the open format and imported again has equal tables, where the format has them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kvlens
from kvlens.store.reader import TraceReader
from kvlens.store.versions import source
from kvlens.trace.exporting import export_trace
from kvlens.trace.importing import import_checked
from kvlens.trace.tables import TABLES
from tests.synthetic import write_synthetic


def rows(reader: TraceReader, table: str) -> pd.DataFrame:
    """The columns of the format that a stored table has."""
    columns = ", ".join(f'"{name}"' for name in TABLES[table].columns)
    order = "place" if table == "event" else "ALL"
    return reader._db.frame(f"SELECT {columns} FROM {source(table)} ORDER BY {order}")


@settings(max_examples=6, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    layers=st.integers(1, 3),
    steps=st.integers(1, 40),
    seed=st.integers(0, 99),
    lens=st.booleans(),
)
def test_tables_are_equal(kv_heads: int, group: int, layers: int, steps: int, seed: int, lens: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        sizes = (layers, kv_heads * group, kv_heads, steps)
        uid = write_synthetic(root / "a", *sizes, 12, seed=seed, lens=lens, prompt_tokens=300, answer="4172")
        with TraceReader.open(root / "a", uid) as before:
            export_trace(before, root / "trace")
            with TraceReader.open(root / "b", import_checked(root / "trace", root / "b")) as after:
                for table in TABLES:
                    pd.testing.assert_frame_equal(rows(before, table), rows(after, table), obj=table)
                assert (len(rows(after, "span_key")) > 0) == lens
                same = ("model", "answer", "budget", "budget_bytes", "head_dim", "prompt_tokens", "method")
                assert before.meta.pick(same) == after.meta.pick(same)
                assert (before.meta.sampled is None) == (after.meta.sampled is None) == (not lens)
                assert before.prompt_text() == after.prompt_text()
                assert after.self_checks()["passed"].all()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> kvlens.Run:
    text = kvlens.sample("demo")
    settings = {"model": "demo", "max_new": 6, "progress": False, "runs": tmp_path_factory.mktemp("runs")}
    return kvlens.run(text, "freekv", budget="40%", **settings)


def test_a_real_run_has_an_equal_verdict(run: kvlens.Run, tmp_path: Path) -> None:
    folder = kvlens.export_trace(run, tmp_path / "trace")
    again = kvlens.import_trace(folder, runs=tmp_path / "runs")
    for table in TABLES:
        pd.testing.assert_frame_equal(rows(run.reader, table), rows(again.reader, table), obj=table)
    assert again.verdict.outcome == run.verdict.outcome
    recorded = [len(rows(run.reader, table)) > 0 for table in ("phase", "decision")]
    assert recorded == [True, True]
    with pytest.raises(kvlens.RunError) as raised:
        kvlens.export_trace(run, folder)
    assert raised.value.code == "trace_failed"


@pytest.mark.parametrize(
    ("method", "budget", "tables"),
    [("snapkv", "25%", ("cut", "phase", "oracle")), ("streaming_llm", "20%", ("effect", "phase", "oracle"))],
)
def test_what_later_versions_added_is_kept(method: str, budget: str, tables: tuple[str, ...], tmp_path: Path) -> None:
    """A run that evicted tokens by a ranking, and a run that lost its answer."""
    text = kvlens.sample("demo")
    run = kvlens.run(text, method, budget=budget, model="demo", max_new=8, progress=False, runs=tmp_path / "a")
    again = kvlens.import_trace(kvlens.export_trace(run, tmp_path / "trace"), runs=tmp_path / "b")
    for table in (*tables, "span_key"):
        before = rows(run.reader, table)
        assert len(before) > 0, table
        pd.testing.assert_frame_equal(before, rows(again.reader, table), obj=table)
    assert run.reader.has_reference_masses()
    assert again.meta.effect_steps == run.meta.effect_steps
    assert again.meta.effect_order == run.meta.effect_order
    assert rows(again.reader, "oracle")["reference_lost_pos"].notna().any()
