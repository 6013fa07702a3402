"""The reader's answers against pandas over the stored rows, on a synthetic run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest

from kvlens.rows import HEAD_COLUMNS, KV_COLUMNS, MASS_COLUMNS
from kvlens.store.queries import HEAD_STEPS
from kvlens.store.reader import TraceError, TraceReader, list_runs
from kvlens.store.session import Session
from kvlens.store.states import changes, replay
from tests.synthetic import write_synthetic

LAYERS, Q, KV, STEPS = 3, 4, 2, 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_synthetic(folder, LAYERS, Q, KV, STEPS, spans=20, seed=3, uid="full-level", top_k=8)
    write_synthetic(folder, LAYERS, Q, KV, STEPS, spans=20, seed=3, uid="summary-level", trace_level="summary")
    write_synthetic(
        folder, LAYERS, Q, KV, STEPS, spans=20, seed=3, uid="heads-level", trace_level="heads", status="cancelled"
    )
    return folder


@pytest.fixture(scope="module")
def reader(runs: Path) -> Iterator[TraceReader]:
    with TraceReader.open(runs, "full-level") as opened:
        yield opened


@pytest.fixture(scope="module")
def rows(reader: TraceReader) -> pd.DataFrame:
    return (
        reader.batches(HEAD_STEPS.format(columns=", ".join(("step", "layer", "q_head", "kv_head", *HEAD_COLUMNS))))
        .read_all()
        .to_pandas()
    )


NOT_MADE = ("corrected", "mass_rewritten", "selection_recall", "reference_regret", "reference_unread")
"""metrics that the synthetic run does not record"""


def test_masses_add_up_to_one_for_every_row(reader: TraceReader, rows: pd.DataFrame) -> None:
    assert len(rows) == STEPS * LAYERS * Q
    total = sum(reader.head_cube(name) for name in MASS_COLUMNS if name not in NOT_MADE)
    assert np.abs(total - 1).max() < 1e-3
    assert (rows["kv_head"] == rows["q_head"] // (Q // KV)).all()
    assert reader.metrics() == [name for name in HEAD_COLUMNS if name not in NOT_MADE]
    assert reader.kv_metrics() == list(KV_COLUMNS)


def test_every_head_row_has_its_spans_and_a_tail(reader: TraceReader) -> None:
    for layer, head in ((0, 0), (2, 3)):
        mass = reader.span_mass(layer, head)
        tails = [reader.head_spans(step, layer, head).attrs["tail_mass"] for step in range(0, STEPS, 7)]
        listed = mass.groupby("step")["mass"].sum().iloc[::7].to_numpy()
        assert np.abs(listed + tails - 1).max() < 0.02
        assert set(mass["step"]) == set(range(STEPS))


@pytest.mark.parametrize("agg", ["mean", "max", "min", "sum"])
@pytest.mark.parametrize(("start", "stop"), [(0, None), (5, 17), (38, 99)])
def test_summary_equals_pandas(reader: TraceReader, rows: pd.DataFrame, agg: str, start: int, stop: int | None) -> None:
    part = rows[(rows["step"] >= start) & (rows["step"] < (STEPS if stop is None else stop))]
    for metric in ("mass_coarse", "entropy", "n_zoomed"):
        want = (
            part.assign(v=part[metric].astype(float))
            .groupby(["layer", "q_head"])["v"]
            .agg(agg)
            .to_numpy()
            .reshape(LAYERS, Q)
        )
        np.testing.assert_allclose(reader.head_summary(metric, start, stop, agg), want, rtol=1e-5)
    assert np.isnan(reader.head_summary("corrected", start, stop, agg)).all()


def test_head_table_equals_pandas_and_the_rollup_equals_the_rows(reader: TraceReader, rows: pd.DataFrame) -> None:
    rolled, asked = reader.head_table(), reader.head_table(0, STEPS)
    pd.testing.assert_frame_equal(rolled, asked)
    part = reader.head_table(3, 11)
    some = rows[(rows["step"] >= 3) & (rows["step"] < 11)].groupby(["layer", "q_head"])
    assert (part["n_steps"] == 8).all()
    np.testing.assert_allclose(part["entropy_nats_mean"], some["entropy"].mean(), rtol=1e-5)
    np.testing.assert_allclose(part["qcos_min"], some["qcos"].min(), rtol=1e-5)
    np.testing.assert_allclose(part["n_zoomed_spans_total"], some["n_zoomed"].sum())
    up = reader.kv_cube("h2d_bytes")[3:11].sum(0)
    for row in part.itertuples():
        assert row.kv_head_h2d_bytes_total == up[row.layer, row.kv_head]
    assert {"run_uid", "method", "model", "mass_coarse_mean", "zoom_rate_mean", "n_corrected"} <= set(part.columns)
    db = reader._db
    assert db.rows("SELECT count(*) FROM run.main.layer_step") == [(STEPS * LAYERS,)]
    worst = db.rows(
        "SELECT max(abs(l.entropy - h.e)) FROM run.main.layer_step AS l JOIN "
        "(SELECT step, layer, avg(entropy::DOUBLE) AS e FROM run.main.head_step GROUP BY step, layer) AS h "
        "USING (step, layer)"
    )
    assert worst[0][0] < 1e-6
    worst = db.rows(
        "SELECT max(abs(l.similarity - k.mean)), max(abs(l.recalled_tokens::BIGINT - k.total)) FROM "
        "run.main.layer_step AS l JOIN "
        "(SELECT step, layer, avg(similarity::DOUBLE) AS mean, sum(recalled_tokens)::BIGINT AS total FROM "
        "run.main.kv_step "
        "GROUP BY step, layer) AS k USING (step, layer)"
    )
    assert worst[0][0] < 1e-6
    assert worst[0][1] == 0
    for row in part.itertuples():
        for metric in ("recalled_tokens", "reused_tokens", "blocking_bytes"):
            assert getattr(row, f"kv_head_{metric}_total") == reader.kv_cube(metric)[3:11, row.layer, row.kv_head].sum()
        mean = reader.kv_cube("similarity")[3:11, row.layer, row.kv_head].mean()
        assert row.kv_head_similarity_mean == pytest.approx(mean, rel=1e-5)


def test_timeline_joins_the_kv_head(reader: TraceReader) -> None:
    line = reader.head_timeline(1, 3)
    assert list(line.columns) == ["step", *HEAD_COLUMNS, *KV_COLUMNS]
    np.testing.assert_array_equal(line["entropy"].to_numpy(np.float32), reader.head_cube("entropy")[:, 1, 3])
    np.testing.assert_array_equal(line["h2d_bytes"].to_numpy(np.float32), reader.kv_cube("h2d_bytes")[:, 1, 1])


def test_mean_span_mass_counts_unlisted_spans_as_nothing(reader: TraceReader) -> None:
    by_hand = pd.concat([reader.span_mass(layer, head) for layer in range(LAYERS) for head in range(Q)])
    inside = by_hand[(by_hand["step"] >= 4) & (by_hand["step"] < 9)].groupby("span")["mass"].sum() / (5 * LAYERS * Q)
    got = reader.mean_span_mass(4, 9).set_index("span")["mass"]
    np.testing.assert_allclose(got, inside, rtol=1e-4)
    each = reader.mean_span_mass_by_step()
    one = each[each["step"] == 7].set_index("span")["mass"]
    np.testing.assert_allclose(one, reader.mean_span_mass(7, 8).set_index("span")["mass"], rtol=1e-5)


def test_states_agree_with_changes_and_head_spans(reader: TraceReader) -> None:
    seen = set()
    for layer, head in ((0, 0), (2, 1)):
        moves = reader.state_changes(layer, head)
        for step in range(0, STEPS, 3):
            states = reader.span_states(step, layer, head).set_index("span")["state"]
            expected = moves[moves["step"] <= step].groupby("span")["state"].last()
            assert states.to_dict() == expected.to_dict()
            top = reader.head_spans(step, layer, head * (Q // KV))
            assert top["state"].tolist() == [states[span] for span in top["span"]]
            seen |= set(states)
    assert {"resident", "coarse", "reconstructed"} <= seen


def test_replay_knows_holders_forms_and_births() -> None:
    spans = [(1, "coarse", "factors"), (2, "coarse", "raw"), (3, "resident", None)]
    events = [(1, "zoom_in", 0), (1, "zoom_in", 1), (2, "zoom_in", None), (1, "zoom_out", 0), (9, "zoom_in", 0)]
    assert replay(spans, events) == {1: "reconstructed", 2: "resident", 3: "resident"}
    assert replay(spans, [*events, (1, "zoom_out", 1), (2, "zoom_out", None)]) == {
        1: "coarse",
        2: "coarse",
        3: "resident",
    }
    assert replay(spans, [(3, "offload", None), (1, "offload", None), (2, "evict", None)]) == {
        1: "coarse",
        2: "evicted",
        3: "cold",
    }
    rows = changes(
        [(1, "coarse", "raw", -1), (2, "coarse", None, 4)],
        [(3, 1, "zoom_in", 0), (3, 1, "zoom_out", 0), (5, 2, "evict", None)],
    )
    assert rows == [(-1, 1, "coarse"), (4, 2, "coarse"), (5, 2, "evicted")]
    some = [(1, "partial", None)]
    kept = [(1, kind, None) for kind in ("offload", "zoom_in", "recall", "zoom_out")]
    assert replay(some, kept) == {1: "partial"}
    assert replay(some, [*kept, (1, "evict", None)]) == {1: "evicted"}


def test_transfers_and_events_of_one_head_include_those_of_its_layer(reader: TraceReader) -> None:
    every = reader.transfers()
    part = reader.transfers(layer=1, kv_head=0)
    want = every[(every["layer"] == 1) & (every["kv_head"].isna() | (every["kv_head"] == 0))]
    assert len(part) == len(want) > 0
    times = reader.transfer_times()
    assert times["bytes"].sum() == every["bytes"].sum()
    assert times["n"].sum() == len(every[["step", "direction", "cause", "start_us", "end_us"]].drop_duplicates())
    by_hand = every.assign(
        moving_us=every["end_us"] - every["start_us"], blocking_bytes=every["bytes"] * every["blocking"]
    )
    sums = (
        by_hand.groupby(["step", "direction", "cause"])[["bytes", "blocking_bytes", "moving_us", "wait_us"]]
        .sum()
        .reset_index()
    )
    assert times.drop(columns="n").astype(sums.dtypes).equals(sums)
    assert times["n"].sum() == len(every)
    assert (reader.events(step=-1)["step"] == -1).all()
    assert {"span_open", "zoom_in", "zoom_out"} <= set(reader.events()["kind"])


def test_small_columns_do_not_wrap_around(reader: TraceReader) -> None:
    spans = reader.spans()
    assert (spans["tok_start"] - spans["tok_end"] < 0).all()
    assert not any(
        str(kind).startswith("uint") for frame in (spans, reader.steps(), reader.head_table()) for kind in frame.dtypes
    )


def test_summary_level_keeps_rollups_only(runs: Path, reader: TraceReader) -> None:
    with TraceReader.open(runs, "summary-level") as small:
        assert small.metrics() == reader.metrics()
        assert np.isnan(small.head_cube("entropy")).all()
        np.testing.assert_allclose(
            small.head_summary("entropy", agg="max"), reader.head_summary("entropy", agg="max"), rtol=1e-6
        )
        left, right = small.head_table(), reader.head_table()
        pd.testing.assert_frame_equal(left.drop(columns="run_uid"), right.drop(columns="run_uid"), rtol=1e-6)
        with pytest.raises(TraceError, match="summary"):
            small.head_table(1, 3)
        assert small.head_spans(3, 0, 0).empty
        assert small.scores(3, 0, 0).empty
        assert small.journal().drop(columns="values").equals(reader.journal().drop(columns="values"))
        count = "SELECT count(*) FROM run.main.layer_step"
        assert small._db.rows(count) == reader._db.rows(count)
    with TraceReader.open(runs, "heads-level") as heads:
        assert heads.status == "cancelled"
        assert heads.span_mass(0, 0).empty
        np.testing.assert_array_equal(heads.head_cube("qcos"), reader.head_cube("qcos"))


def test_list_runs_and_two_readers_at_once(runs: Path, reader: TraceReader) -> None:
    frame = list_runs(runs).set_index("uid")
    assert frame.loc["full-level", "status"] == "completed"
    assert frame.loc["heads-level", "status"] == "cancelled"
    assert (frame["model"] == "synthetic").all()
    assert (frame["steps"] == STEPS).all()
    assert (frame["h2d_bytes"] > 0).all()
    assert list_runs(runs / "absent").empty
    with TraceReader.open(runs, "full-level") as second:
        assert second.steps().equals(reader.steps())


def test_names_are_checked_before_they_reach_a_statement(reader: TraceReader) -> None:
    for call in (
        lambda: reader.head_cube("entropy FROM run.main.meta --"),
        lambda: reader.kv_cube("entropy"),
        lambda: reader.head_summary("entropy", agg="median"),
    ):
        with pytest.raises(ValueError, match="there are"):
            call()


def test_reading_needs_neither_torch_nor_streamlit() -> None:
    code = (
        "import sys, kvlens.store.reader, kvlens.store.export, kvlens.store.recover; "
        "print([name for name in ('torch', 'streamlit', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_null_is_not_recorded_whatever_its_column() -> None:
    """NaN among figures, whatever they were stored as; None among texts and lists. Without one, figures stay whole."""
    columns = "t(a, b, c, d, e, f)"
    rows = "(1::UTINYINT, 2::INTEGER, 0.5::FLOAT, true, 'x', [1, 2]), (NULL, NULL, NULL, NULL, NULL, NULL)"
    session = Session(duckdb.connect(), "x")
    frame = session.frame(f"SELECT * FROM (VALUES {rows}) {columns}")
    assert frame["a"].dtype == frame["b"].dtype == frame["d"].dtype == np.float64
    assert frame["c"].dtype == np.float32
    assert frame.loc[0, ["a", "b", "c", "d", "e"]].tolist() == [1.0, 2.0, 0.5, 1.0, "x"]
    assert frame.loc[0, "f"].tolist() == [1, 2]
    assert frame.isna().loc[1].all()
    whole = session.frame(f"SELECT * FROM (VALUES {rows}) {columns} WHERE a IS NOT NULL")
    assert [str(kind) for kind in whole.dtypes] == ["int64", "int32", "float32", "bool", "str", "object"]
    assert str(session.frame("SELECT 'x'::ENUM('x', 'y') AS text")["text"][0]) == "x"
