"""What was moved and not used, against traces made by hand: one layer, two query heads that share a KV head unless said
otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from store_support import make_prefill

from kvlens.meta import RunMeta
from kvlens.records import StepRecord
from kvlens.rows import EventRow, TransferRow
from kvlens.store import memoryrecords
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter
from tests.synthetic import write_synthetic

Tops = list[list[tuple[int, float]]]
"""per query head: (span, mass)"""


def step(
    number: int,
    tops: Tops,
    transfers: list[TransferRow] | None = None,
    events: list[EventRow] | None = None,
    tail: float = 0.1,
    kv: int = 1,
) -> StepRecord:
    spans = np.full((1, len(tops), 2), -1, np.int32)
    masses = np.zeros(spans.shape, np.float32)
    for head, listed in enumerate(tops):
        for place, (span, mass) in enumerate(listed):
            spans[0, head, place], masses[0, head, place] = span, mass
    tails = np.full(spans.shape[:2], tail, np.float32)
    moved = {"h2d_bytes": np.full((1, kv), 100.0), "ideal_bytes": np.array([[60.0, *[np.nan] * (kv - 1)]])}
    return StepRecord(
        step=number,
        t_us=number * 1000,
        dur_us=900,
        wait_us=0,
        record_us=0,
        token_id=7,
        text="x",
        logprob=-1.0,
        next_entropy=1.0,
        resident_bytes=10,
        peak_bytes=10,
        cold_bytes=10,
        head={},
        kv=moved,
        top_span=spans,
        top_mass=masses,
        tail_mass=tails,
        transfers=transfers or [],
        events=events or [],
    )


def copy(
    number: int,
    span: int | None,
    size: int = 100,
    cause: str = "recall",
    blocking: bool = True,
    kv_head: int | None = 0,
) -> TransferRow:
    return TransferRow(number, 0, kv_head, span, "h2d", cause, size, number * 1000 + 5, number * 1000 + 9, 0, blocking)


def event(number: int, kind: str, span: int, q_head: int | None = None, kv_head: int | None = 0) -> EventRow:
    return EventRow(number, 0, kv_head, q_head, kind, span)


def judge(folder: Path, records: list[StepRecord], level: str = "spans", kv_heads: int = 1) -> pd.DataFrame:
    writer = TraceWriter(folder, None, level)
    writer.begin(RunMeta(layers=1, q_heads=2, kv_heads=kv_heads, model="m", method="full", config={}))
    prefill = replace(make_prefill(), transfers=[], span_heads=[], journal=[])
    writer.prefill(prefill)
    for record in records:
        writer.step(record)
    writer.finish("completed", None, [], {})
    with TraceReader.open(folder, writer.uid) as reader:
        return reader.moved_spans()


NOBODY: Tops = [[(0, 0.9), (9, 0.04)], [(0, 0.9), (8, 0.01)]]


def test_a_copy_is_listed_when_any_query_head_lists_it_while_it_is_hot(tmp_path: Path) -> None:
    seen: Tops = [[(0, 0.9)], [(0, 0.5), (4, 0.25)]]
    found = judge(
        tmp_path,
        [
            step(0, NOBODY, [copy(0, 4)], [event(0, "recall", 4)]),
            step(1, seen),
            step(2, NOBODY, None, [event(2, "release", 4)]),
            step(3, seen),
        ],
    )
    row = found.iloc[0]
    assert (row["verdict"], row["first_step"], row["last_step"], row["bytes"]) == ("listed", 0, 2, 100)
    assert row["largest_mass"] == pytest.approx(0.25, abs=0.003)
    assert np.isnan(row["at_most"])


def test_use_after_it_was_given_up_or_before_it_came_is_not_its_use(tmp_path: Path) -> None:
    seen: Tops = [[(4, 0.9)], [(4, 0.9)]]
    found = judge(
        tmp_path,
        [
            step(0, seen),
            step(1, NOBODY, [copy(1, 4)], [event(1, "release", 4), event(1, "recall", 4)]),
            step(2, NOBODY, None, [event(2, "release", 4)]),
            step(3, seen, [copy(3, 4)], [event(3, "recall", 4)]),
        ],
    )
    assert found["verdict"].tolist() == ["unlisted", "listed"]
    assert found["first_step"].tolist() == [1, 3]
    assert found["last_step"].tolist() == [2, 3]


def test_the_bound_is_the_smaller_of_tail_and_least_listed_mass_of_the_worst_head(tmp_path: Path) -> None:
    records = [step(0, NOBODY, [copy(0, 4)], [event(0, "recall", 4)], tail=0.02)]
    assert judge(tmp_path / "tail", records).at[0, "at_most"] == pytest.approx(0.02, abs=2e-4)
    records = [step(0, NOBODY, [copy(0, 4)], [event(0, "recall", 4)], tail=0.5), step(1, NOBODY, tail=0.5)]
    bound = judge(tmp_path / "listed", records).at[0, "at_most"]
    assert 0.04 <= bound <= 0.0425


def test_what_came_in_the_background_counts_from_its_arrival(tmp_path: Path) -> None:
    early: Tops = [[(4, 0.9)], [(5, 0.9)]]
    found = judge(
        tmp_path,
        [
            step(
                0, early, [copy(0, 4, cause="prefetch", blocking=False), copy(0, 5, cause="prefetch", blocking=False)]
            ),
            step(1, NOBODY, [copy(1, 5, cause="correction")], [event(1, "prefetch", 4), event(1, "correction", 5)]),
        ],
    )
    assert found["verdict"].tolist() == ["unlisted", "pending", "unlisted"]
    assert found["first_step"].tolist()[0] == 1
    assert np.isnan(found["first_step"].tolist()[1])


def test_a_copy_for_all_kv_heads_is_judged_for_each(tmp_path: Path) -> None:
    tops: Tops = [[(4, 0.9)], [(0, 0.9)]]
    found = judge(
        tmp_path,
        [step(0, tops, [copy(0, 4, 101, kv_head=None)], [event(0, "recall", 4, kv_head=None)], kv=2)],
        kv_heads=2,
    )
    assert found[["kv_head", "bytes", "verdict"]].to_numpy().tolist() == [[0, 50, "listed"], [1, 50, "unlisted"]]


def test_a_query_head_that_lets_go_does_not_end_the_stay_of_a_zoom(tmp_path: Path) -> None:
    seen: Tops = [[(4, 0.9)], [(0, 0.9)]]
    found = judge(
        tmp_path,
        [
            step(0, NOBODY, [copy(0, 4, cause="zoom")], [event(0, "zoom_in", 4, q_head=1, kv_head=None)]),
            step(1, NOBODY, None, [event(1, "zoom_out", 4, q_head=1, kv_head=None)]),
            step(2, seen),
        ],
    )
    assert found["verdict"].tolist() == ["listed"]


def test_nothing_is_said_of_copies_without_a_span_or_of_runs_without_top_spans(tmp_path: Path) -> None:
    records = [step(0, NOBODY, [copy(0, None), copy(0, 4)], [event(0, "recall", 4)])]
    assert judge(tmp_path / "spans", records)["verdict"].tolist() == ["no span", "unlisted"]
    assert judge(tmp_path / "heads", records, "heads")["verdict"].tolist() == ["no span", "not recorded"]


def test_every_byte_to_the_device_is_judged_once(tmp_path: Path) -> None:
    with TraceReader.open(tmp_path, write_synthetic(tmp_path, 2, 4, 2, 30, 12, top_k=3)) as reader:
        found = reader.moved_spans()
        assert found["bytes"].sum() == reader.steps()["h2d_bytes"].sum()
        assert set(found["verdict"]) <= {"listed", "unlisted"}
        masses = pd.concat([reader.span_mass(0, head) for head in (0, 1)])
        for row in found[(found["layer"] == 0) & (found["kv_head"] == 0)].itertuples():
            mine = masses[(masses["span"] == row.span) & masses["step"].between(row.first_step, row.last_step)]["mass"]
            assert (row.verdict == "listed") == bool(len(mine))
            if len(mine):
                assert row.largest_mass == pytest.approx(mine.max(), abs=1e-6)


def test_truncation_counts_only_where_an_ideal_is_recorded(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    writer.begin(RunMeta(layers=1, q_heads=2, kv_heads=2, model="m", method="full", config={}))
    prefill = replace(make_prefill(), transfers=[], span_heads=[], journal=[])
    writer.prefill(prefill)
    for number in range(3):
        writer.step(step(number, NOBODY, kv=2))
    writer.finish("completed", None, [], {})
    with TraceReader.open(tmp_path, writer.uid) as reader:
        assert reader.truncation().to_numpy().tolist() == [[0, 0, 300, 180, 3]]


def test_a_long_run_of_many_heads_is_read_a_layer_at_a_time_with_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TraceReader.open(tmp_path, write_synthetic(tmp_path, 3, 4, 2, 30, 12, top_k=3)) as reader:
        whole = reader.moved_spans()
        sizes: list[int] = []
        frame = reader._db.frame

        def count_frame(sql: str, **values: Any) -> pd.DataFrame:
            sizes.append(values["stop_layer"] - values["first_layer"])
            return frame(sql, **values)

        monkeypatch.setattr(reader._db, "frame", count_frame)
        monkeypatch.setattr(memoryrecords, "MOST_HEAD_STEPS", 1)
        pd.testing.assert_frame_equal(reader.moved_spans(), whole)
        assert sizes == [1, 1, 1]
