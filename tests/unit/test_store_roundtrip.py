"""What a recorder hands over comes back: values, absences, order, text."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_support import COSINES, make_oracle, make_prefill, make_scores, make_step, stored, write

from kvlens.instruments import Scores
from kvlens.meta import RunMeta
from kvlens.records import StepRecord
from kvlens.rows import HEAD_COLUMNS, KV_COLUMNS, EventRow, JournalRow, TransferRow
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    top_k=st.integers(0, 5),
    steps=st.integers(0, 11),
    block=st.integers(1, 6),
    skip=st.sets(st.sampled_from([*HEAD_COLUMNS, *KV_COLUMNS])),
    texts=st.lists(st.text(st.characters(codec=None), max_size=5), min_size=11, max_size=11),
)
def test_every_value_comes_back(
    seed: int,
    layers: int,
    kv_heads: int,
    group: int,
    top_k: int,
    steps: int,
    block: int,
    skip: set[str],
    texts: list[str],
) -> None:
    rng = np.random.default_rng(seed)
    sizes = (layers, kv_heads * group, kv_heads, top_k)
    records = [make_step(rng, step, sizes, texts[step], skip) for step in range(steps)]
    with tempfile.TemporaryDirectory() as name, write(Path(name), records, sizes, block_steps=block) as reader:
        assert (reader.n_steps, reader.n_layers, reader.q_heads, reader.kv_heads) == (steps, *sizes[:3])
        for metric in HEAD_COLUMNS:
            want = np.array([r.head.get(metric, np.full(sizes[:2], np.nan)) for r in records], np.float32).reshape(
                -1, *sizes[:2]
            )
            np.testing.assert_array_equal(reader.head_cube(metric), stored(want))
            assert (metric in reader.metrics()) == bool(np.isfinite(want).any())
        for metric in KV_COLUMNS:
            want = np.array([r.kv.get(metric, np.full((layers, kv_heads), np.nan)) for r in records]).reshape(
                -1, layers, kv_heads
            )
            np.testing.assert_array_equal(
                reader.kv_cube(metric), stored(want) if metric in COSINES else want.astype(np.float32)
            )
            assert (metric in reader.kv_metrics()) == bool(np.isfinite(want).any())
        tokens = reader.tokens()
        assert list(tokens["pos"]) == list(range(3 + steps))
        assert list(tokens["text"][3:]) == [t.encode("utf-8", "replace").decode() for t in texts[:steps]]
        assert tokens["step"].isna().sum() == 3
        assert tokens["next_entropy"].isna().all()
        _check_rows(reader, records)
        _check_spans(reader, records)
        _check_journal(reader, records)
        _check_scores(reader, records)


def _check_rows(reader: TraceReader, records: list[StepRecord]) -> None:
    given_rows = list(itertools.chain.from_iterable(record.transfers for record in records))
    got = reader.transfers()
    got = got[got["step"] >= 0]
    for name in ("step", "layer", "kv_head", "span", "bytes", "wait_us", "blocking", "direction", "cause"):
        assert _plain(got[name]) == [getattr(row, name) for row in given_rows]
    events = list(itertools.chain.from_iterable(record.events for record in records))
    got = reader.events()
    for name in ("step", "layer", "kv_head", "q_head", "kind", "span", "value"):
        assert _plain(got[name]) == [getattr(row, name) for row in events]
    moved = [sum(t.bytes for t in record.transfers if t.direction == "h2d") for record in records]
    assert list(reader.steps()["h2d_bytes"]) == moved


def _check_spans(reader: TraceReader, records: list[StepRecord]) -> None:
    assert reader.span_rows() == tuple(make_prefill().spans)
    for record in records[:: max(len(records) // 2, 1)]:
        for layer in {0, reader.n_layers - 1}:
            for head in {0, reader.q_heads - 1}:
                got = reader.head_spans(record.step, layer, head)
                known = record.top_span[layer, head] >= 0
                want = dict(
                    zip(
                        record.top_span[layer, head][known].tolist(),
                        record.top_mass[layer, head][known].tolist(),
                        strict=True,
                    )
                )
                assert set(got["span"]) == set(want)
                for span, mass in zip(got["span"], got["mass"], strict=True):
                    assert abs(mass - want[span]) <= np.sqrt(want[span]) / 255 + 1e-5
                assert list(got["mass"]) == sorted(got["mass"], reverse=True)
                assert got.attrs["tail_mass"] == pytest.approx(float(record.tail_mass[layer, head]), abs=6e-5)


def _check_journal(reader: TraceReader, records: list[StepRecord]) -> None:
    def place(row: JournalRow) -> tuple[int, int, int, str]:
        return row.step, -1 if row.layer is None else row.layer, -1 if row.kv_head is None else row.kv_head, row.name

    want = sorted((row for record in records for row in record.journal), key=place)
    got = reader.journal()
    assert list(got.columns) == ["step", "layer", "kv_head", "name", "values"]
    np.testing.assert_array_equal(got["values"].iloc[0], np.array([0.25, np.nan], np.float32))
    got = got[got["step"] >= 0]
    for name in ("step", "layer", "kv_head", "name"):
        assert _plain(got[name]) == [getattr(row, name) for row in want]
    for found, row in zip(got["values"], want, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, row.values)
    assert reader.journal_names() == sorted({row.name for row in want} | {"head_share"})
    assert set(reader.journal("name 1")["name"]) <= {"name 1"}


def _check_scores(reader: TraceReader, records: list[StepRecord]) -> None:
    layer, head = reader.n_layers - 1, reader.kv_heads - 1
    for record in records:
        got = reader.scores(record.step, layer, head)
        assert list(got.columns) == ["span", "score", "chosen", "rank"]
        if record.scores is None:
            assert got.empty
            assert got.attrs["candidates"] is None
            continue
        listed = record.scores.span[layer, head] >= 0
        np.testing.assert_array_equal(got["span"], record.scores.span[layer, head][listed])
        np.testing.assert_array_equal(got["score"].to_numpy(np.float32), record.scores.score[layer, head][listed])
        np.testing.assert_array_equal(got["chosen"].astype(bool), record.scores.chosen[layer, head][listed])
        assert list(got["rank"]) == list(range(1, listed.sum() + 1))
        assert got.attrs["candidates"] == record.scores.candidates[layer, head]


def _plain(series: Any) -> list[Any]:
    return [None if value is None or value != value else value for value in series.tolist()]


def test_null_is_not_zero(tmp_path: Path) -> None:
    sizes = (1, 2, 1, 1)
    head = {"mass_sink": np.array([[0.0, np.nan]], np.float32), "corrected": np.array([[np.nan, 0.0]], np.float32)}
    record = replace(make_step(np.random.default_rng(0), 0, sizes), head=head, kv={"h2d_bytes": np.array([[0.0]])})
    with write(tmp_path, [record], sizes) as reader:
        assert reader.metrics() == ["mass_sink", "corrected"]
        assert reader.kv_metrics() == ["h2d_bytes"]
        sink = reader.head_cube("mass_sink")[0, 0]
        assert sink[0] == 0
        assert np.isnan(sink[1])
        table = reader.head_table()
        assert np.isnan(table["mass_sink_mean"][1])
        assert table["n_corrected"].isna().tolist() == [True, False]
        assert table["kv_head_d2h_bytes_total"].isna().all()
        assert table["entropy_nats_mean"].isna().all()


def test_what_came_before_the_first_record_counts_in_the_duration(tmp_path: Path) -> None:
    began, writer = time.monotonic(), TraceWriter(tmp_path)
    time.sleep(0.3)  # prefill: the trace begins when it has succeeded
    writer.begin(RunMeta(layers=2, q_heads=2, kv_heads=1))
    writer.step(make_step(np.random.default_rng(1), 0, (2, 2, 1, 3)))
    writer.finish("completed", None, [], {})
    info = json.loads((tmp_path / writer.uid / "run.json").read_text(encoding="utf-8"))
    assert 0.3 <= info["duration_s"] <= time.monotonic() - began + 0.001, "in seconds, rounded to milliseconds"


def test_a_step_that_cannot_be_logged_is_in_no_table(tmp_path: Path) -> None:
    """A run that fails on a step's last rows ends with the step before, in the tables of scores and of full attention
    too."""
    sizes, rng, writer = (2, 2, 1, 3), np.random.default_rng(2), TraceWriter(tmp_path)
    writer.begin(RunMeta(layers=2, q_heads=2, kv_heads=1))
    records = [
        replace(make_step(rng, step, sizes), scores=make_scores(rng, 2, 1), oracle=make_oracle(rng, 2, 2))
        for step in range(3)
    ]
    writer.prefill(make_prefill())
    for record in records[:2]:
        writer.step(record)
    with pytest.raises(AttributeError):
        writer.step(replace(records[2], journal=[object()]))  # type: ignore[list-item]
    writer.finish("failed", "AttributeError", [], {"output_text": "xx"})
    with TraceReader.open(tmp_path, writer.uid) as reader:
        assert reader.n_steps == 2
        sampled = [bool(np.isfinite(record.oracle.tail_full[0, 0])) for record in records if record.oracle is not None]
        assert any(sampled[:2])
        assert [bool(np.isfinite(reader.oracle_tail(step, 0, 0))) for step in range(3)] == [*sampled[:2], False]
        assert [reader.scores(step, 0, 0).attrs["candidates"] is not None for step in range(3)] == [True, True, False]


def test_the_recorder_may_reuse_its_arrays(tmp_path: Path) -> None:
    sizes = (2, 2, 1, 3)
    rng = np.random.default_rng(1)
    scores, oracle = make_scores(rng, 2, 1), make_oracle(rng, 2, 2)
    own = JournalRow(0, None, None, "own", np.array([1.0, 2.0], np.float32))
    record = replace(make_step(rng, 0, sizes), scores=scores, oracle=oracle, journal=[own])
    kept, tail, ranked = record.head["entropy"].copy(), oracle.tail_full.copy(), scores.candidates.copy()
    writer = TraceWriter(tmp_path)
    writer.begin(RunMeta(layers=2, q_heads=2, kv_heads=1))
    writer.prefill(make_prefill())
    writer.step(record)
    scores.candidates[:] = 99
    oracle.tail_full[:] = 99
    own.values[:] = 99
    record.head["entropy"][:] = -1
    record.top_span[:] = 9
    writer.finish("completed", None, [], {})
    with TraceReader.open(tmp_path, writer.uid) as reader:
        np.testing.assert_array_equal(reader.head_cube("entropy")[0], stored(kept))
        found = [[reader.oracle_tail(0, layer, head) for head in range(2)] for layer in range(2)]
        np.testing.assert_allclose(found, tail, atol=1e-6)
        assert reader.journal("own")["values"].iloc[0].tolist() == [1, 2]
        assert [reader.scores(0, layer, 0).attrs["candidates"] for layer in (0, 1)] == ranked[:, 0].tolist()


def test_rows_are_stored_head_by_head_within_a_block(tmp_path: Path) -> None:
    sizes = (2, 2, 1, 1)
    records = [make_step(np.random.default_rng(step), step, sizes) for step in range(6)]
    with write(tmp_path, records, sizes, block_steps=4) as reader:
        rows = reader._db.rows("SELECT step, layer, q_head FROM run.main.head_step ORDER BY rowid")
    order = [
        (step, layer, head)
        for block in (range(4), range(4, 6))
        for layer in (0, 1)
        for head in (0, 1)
        for step in block
    ]
    assert rows == order


def test_query_heads_of_a_group_are_neighbours(tmp_path: Path) -> None:
    sizes = (2, 6, 2, 1)
    with write(tmp_path, [make_step(np.random.default_rng(0), 0, sizes)], sizes) as reader:
        for table in (reader.head_table(), reader._db.frame("SELECT * FROM run.main.head_step")):
            found = table.sort_values(["layer", "q_head"])["kv_head"].tolist()
            assert found == [0, 0, 0, 1, 1, 1] * 2


def test_meta_status_checks_and_files_of_a_finished_run(tmp_path: Path) -> None:
    sizes = (1, 1, 1, 1)
    with write(tmp_path, [make_step(np.random.default_rng(0), 0, sizes)], sizes, uid="my-run-1") as reader:
        assert reader.uid == "my-run-1"
        assert reader.status == "completed"
        assert reader.error is None
        assert reader.meta.config == {"a": 1}
        assert reader.meta.answer == "42"
        assert reader.meta.prefill_peak_bytes == 20
        checks = reader.self_checks().set_index("name")
        assert checks.loc["given", "value"] == 0.5
        assert checks.loc["stored_rows_complete", "passed"]
    folder = tmp_path / "my-run-1"
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "run.json", "trace.duckdb"]
    assert (folder / "trace.duckdb").stat().st_mode & 0o222 == 0
    info = json.loads((folder / "run.json").read_text())
    assert (info["status"], info["steps"], info["peak_bytes"], info["output_text"]) == ("completed", 1, 200, "x")


def _ranked(**change: np.ndarray) -> Scores:
    good = {"span": np.zeros((1, 1, 3), np.int32), "score": np.zeros((1, 1, 3)), "chosen": np.zeros((1, 1, 3), bool)}
    return Scores(**(good | {"candidates": np.array([[3]])} | change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"step": 5}, "step 1 was due"),
        ({"head": {"entropy": np.zeros((2, 2))}}, "shape"),
        ({"head": {"hunger": np.zeros((1, 1))}}, "no column"),
        ({"events": [EventRow(1, None, None, None, "party", None)]}, "party"),
        ({"kv": {"n_recalled": np.array([[-1.0]])}}, "negative"),
        ({"kv": {"n_recalled": np.array([[0.5]])}}, "fractional"),
        ({"transfers": [TransferRow(1, 999, None, None, "h2d", "zoom", 1, 1, 1, 1, True)]}, "transfer"),
        ({"journal": [JournalRow(1, 0, None, "flat", np.zeros((1, 1)))]}, "no named vector"),
        ({"journal": [JournalRow(1, 0, None, "", np.zeros(1))]}, "no named vector"),
        ({"journal": [JournalRow(1, 999, None, "far", np.zeros(1))]}, "journal"),
        ({"scores": _ranked(span=np.zeros((2, 1, 3), np.int32))}, "scores.span with shape"),
        ({"scores": _ranked(chosen=np.zeros((1, 1, 2), bool))}, "scores.chosen with shape"),
        ({"scores": _ranked(candidates=np.array([[-1]]))}, "negative"),
        ({"scores": _ranked(span=np.full((1, 1, 3), 70_000))}, "Span ids above"),
        ({"top_span": np.full((1, 1, 1), 70_000, np.int32)}, "Span ids above"),
    ],
)
def test_a_record_that_does_not_fit_fails_the_run_in_one_sentence(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    sizes = (1, 1, 1, 1)
    rng = np.random.default_rng(0)
    writer = TraceWriter(tmp_path, block_steps=1)
    writer.begin(RunMeta(layers=1, q_heads=1, kv_heads=1))
    writer.prefill(make_prefill(layers=1))
    writer.step(make_step(rng, 0, sizes))
    bad = replace(make_step(rng, 1, sizes), **change)

    def log_and_finish() -> None:
        writer.step(bad)
        writer.finish("completed", None, [], {})

    with pytest.raises(TraceError, match=sentence) as caught:
        log_and_finish()
    assert "\n" not in str(caught.value)
    with pytest.raises(TraceError):
        writer.step(make_step(rng, 2, sizes))
    writer.finish("failed", "the engine gives up", [], {})
    with TraceReader.open(tmp_path, writer.uid) as reader:
        assert reader.status == "failed"
        assert reader.n_steps == 1
        assert str(reader.error) == str(caught.value)
