"""Effects at lost steps: what comes back of them, beside what, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pytest
from store_support import make_effects, make_step, one_sentence, write

from kvlens.instruments import Effects, Oracle
from kvlens.records import StepRecord
from kvlens.store.effects import effect_table
from kvlens.store.errors import DamagedTrace, TraceError
from kvlens.store.reader import TraceReader


def listing(step: int, rng: np.random.Generator) -> StepRecord:
    """A step of one layer, four query heads and two KV heads that lists spans 0, 1 and 7."""
    full = np.tile(np.array([0.5, 0.3, 0.1], np.float32), (1, 4, 1))
    span = np.tile(np.array([0, 1, 7], np.int32), (1, 4, 1))
    oracle = Oracle(span, full, full * np.float32(0.5), np.full((1, 4), 0.1, np.float32))
    return replace(make_step(rng, step, (1, 4, 2, 1)), oracle=oracle)


def test_effects_come_back_and_stand_beside_their_triples(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    records = [listing(step, rng) for step in range(3)]
    found = [
        make_effects(0, (0, 1, 1)),
        make_effects(2, (0, 0, 1), (0, 1, 0), (0, 0, 0), (0, 1, 1), effect=(0.125, 3.1, 0.125, 1e-60)),
    ]
    with write(tmp_path, records, (1, 4, 2, 1), found, block_steps=2) as reader:
        assert reader.effects(1).empty
        assert reader.effects(0).to_numpy().tolist() == [[0, 1, 1, 1.0, 2.5, 1]]
        effects, triples = reader.effects(2), reader.triples(2)
        assert list(effects.columns) == ["layer", "kv_head", "span", "effect", "lead", "place"]
        assert effects[["layer", "kv_head", "span"]].to_numpy().tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 1]]
        assert effects["effect"].tolist() == [float(np.float32(3.1)), 0.125, 0.125]
        assert set(effects["lead"]) == {2.5}
        assert triples[["kv_head", "span"]].to_numpy().tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [0, 7], [1, 7]]
        told = [0.125, float(np.float32(3.1)), 0.125, np.nan, np.nan, np.nan]
        np.testing.assert_array_equal(triples["effect"], told)
        assert reader.triples(1)["effect"].isna().all()


def test_an_effect_of_a_span_that_no_head_listed_stands_among_the_triples_in_the_order_of_the_run(
    tmp_path: Path,
) -> None:
    record = listing(0, np.random.default_rng(3))
    assert record.oracle is not None
    first = replace(record.oracle, span=np.where(record.oracle.span == 1, -1, record.oracle.span))
    found = [make_effects(0, (0, 1, 0), (0, 0, 1))]
    with write(tmp_path, [replace(record, oracle=first)], (1, 4, 2, 1), found) as reader:
        reader.meta = reader.meta.model_copy(update={"effect_order": ((0, 0, 1), (0, 1, 0)), "effect_steps": (0, 2)})
        assert reader.effects(0)[["span", "place"]].to_numpy().tolist() == [[1, 1], [0, 2]]
        assert reader.effects(0)["effect"].tolist() == [0.5, 1.0]
        row = reader.triples(0).query("kv_head == 0 and span == 1")
        assert row[["full", "mass", "regret", "hidden", "effect", "place"]].to_numpy().tolist() == [
            [0, 0, 0, 0, 0.5, 1]
        ]


@pytest.mark.parametrize(
    ("row", "column", "fault"),
    [
        ("2.5, 0, 0, 4000, 1.0", "span", "out_of_range"),
        ("2.5, 200, 0, 1, 1.0", "layer", "out_of_range"),
        ("2.5, 0, 9, 1, 1.0", "kv_head", "out_of_range"),
        ("2.5, 0, 0, 1, 0.5", "step, layer, kv_head, span", "duplicate"),
        ("2.5, 0, 1, 1, 'nan'", "effect", "not_finite"),
        ("2.5, 0, 1, 1, 'inf'", "effect", "not_finite"),
        ("2.5, 0, 1, 1, -1.0", "effect", "out_of_range"),
        ("'-inf', 0, 1, 1, 1.0", "lead", "not_finite"),
    ],
)
def test_a_trace_with_effects_that_no_run_can_have_is_not_opened(
    tmp_path: Path, row: str, column: str, fault: str
) -> None:
    with write(tmp_path, [listing(0, np.random.default_rng(1))], (1, 4, 2, 1), [make_effects(0, (0, 0, 1))]) as reader:
        trace = reader.runs_dir / reader.uid / "trace.duckdb"
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        con.execute(f"INSERT INTO effect VALUES (0, {row})")
    with pytest.raises(DamagedTrace) as refused:
        TraceReader.open(tmp_path, trace.parent.name)
    one_sentence(refused.value)
    assert refused.value.values == {
        "uid": trace.parent.name,
        "table": "effect",
        "column": column,
        "fault": fault,
        "rows": 1,
    }


@pytest.mark.parametrize(
    "effects",
    [
        make_effects(2, (0, 0, 1)),
        make_effects(-1, (0, 0, 1)),
        make_effects(0, (1, 0, 1)),
        make_effects(0, (0, 2, 1)),
        make_effects(0, (0, 0, -1)),
        make_effects(0, (0, 0, 70_000)),
        make_effects(0, (0, 0, 1), (0, 0, 1)),
        make_effects(0, (0, 0, 0)),
        make_effects(0, (0, 0, 1), effect=(1.0, 2.0)),
        make_effects(0, (0, 0, 1), effect=(-1e-3,)),
        make_effects(0, (0, 0, 1), effect=(float("nan"),)),
        make_effects(0, (0, 0, 1), effect=(float("inf"),)),
        make_effects(0, (0, 0, 1), lead=float("nan")),
    ],
    ids=[
        "step",
        "before",
        "layer",
        "head",
        "none",
        "span",
        "twice",
        "again",
        "shape",
        "below",
        "gap",
        "endless",
        "lead",
    ],
)
def test_effects_that_do_not_fit_are_refused(effects: Effects) -> None:
    with pytest.raises(TraceError, match=r"[Ee]ffects") as refused:
        effect_table([make_effects(0, (0, 0, 0)), effects], (1, 2), 2)
    one_sentence(refused.value)


def test_effects_that_do_not_fit_fail_the_run_and_leave_its_steps(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be stored"):
        write(tmp_path, [listing(0, np.random.default_rng(1))], (1, 4, 2, 1), [make_effects(1, (0, 0, 1))])
    (uid,) = (path.name for path in tmp_path.iterdir())
    with TraceReader.open(tmp_path, uid) as reader:
        assert (reader.status, reader.n_steps) == ("failed", 1)
        assert reader.effects(0).empty
