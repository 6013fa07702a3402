"""Loss, full attention by span, regret and span keys come back as they were handed over."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_support import make_oracle, make_prefill, make_span_keys, make_step, one_sentence, stored, write

from kvlens.instruments import Oracle, SpanKeys
from kvlens.meta import RunMeta
from kvlens.records import StepRecord
from kvlens.store.errors import TraceError
from kvlens.store.export import export
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter
from tests.synthetic import write_synthetic

ATOL = 2e-5
"""of a mass near 1, by how it is coded"""


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    steps=st.integers(0, 7),
    block=st.integers(1, 4),
    texts=st.lists(st.text(st.characters(codec=None), max_size=5), min_size=7, max_size=7),
)
def test_every_value_comes_back(
    seed: int, layers: int, kv_heads: int, group: int, steps: int, block: int, texts: list[str]
) -> None:
    rng = np.random.default_rng(seed)
    sizes = (layers, kv_heads * group, kv_heads, 2)
    records = [make_step(rng, step, sizes, texts[step]) for step in range(steps)]
    with tempfile.TemporaryDirectory() as name, write(Path(name), records, sizes, block_steps=block) as reader:
        _check_loss(reader, records)
        for record in records:
            _check_step(reader, record, group)
        for layer in range(layers):
            for head in range(kv_heads):
                found, given_keys = (
                    reader.span_keys(layer, head),
                    make_span_keys(np.random.default_rng(5), layers, kv_heads),
                )
                assert found is not None
                order = np.argsort(given_keys.span)
                np.testing.assert_array_equal(found[0], given_keys.span[order])
                np.testing.assert_array_equal(found[1], given_keys.keys[layer, head][order])
                assert found[2] == "pre-rope"


def _check_loss(reader: TraceReader, records: list[StepRecord]) -> None:
    got = reader.loss()
    want = [record for record in records if record.loss is not None]
    assert list(got["step"]) == [record.step for record in want]
    for place, record in enumerate(want):
        row = got.iloc[place]
        for name, value in vars(record.loss).items():
            if isinstance(value, str):
                assert row[name] == value.encode("utf-8", "replace").decode()
            else:
                np.testing.assert_equal(
                    float(row[name]), float(np.float32(value)) if isinstance(value, float) else float(value)
                )


def _check_step(reader: TraceReader, record: StepRecord, group: int) -> None:
    rows = reader.oracle_step(record.step)
    triples = reader.triples(record.step)
    if record.oracle is None:
        assert rows.empty
        assert triples.empty
        return
    sums: dict[tuple[int, int, int], np.ndarray] = {}
    for layer, head in np.ndindex(reader.n_layers, reader.q_heads):
        listed = record.oracle.span[layer, head] >= 0
        spans = record.oracle.span[layer, head][listed]
        full, mass = (values[layer, head][listed].astype(float) for values in (record.oracle.full, record.oracle.mass))
        order = np.lexsort((spans, -full))
        got = reader.oracle(record.step, layer, head)
        np.testing.assert_array_equal(got["span"], spans[order])
        np.testing.assert_allclose(got["full"], full[order], atol=ATOL)
        np.testing.assert_allclose(got["mass"], mass[order], atol=ATOL)
        np.testing.assert_allclose(got["regret"], np.maximum(full - mass, 0)[order], atol=2 * ATOL)
        np.testing.assert_allclose(
            reader.oracle_tail(record.step, layer, head), record.oracle.tail_full[layer, head], atol=1e-6
        )
        here = rows[(rows["layer"] == layer) & (rows["q_head"] == head)]
        assert (here["kv_head"] == head // group).all()
        np.testing.assert_array_equal(here["span"], got["span"])
        np.testing.assert_array_equal(here["regret"], got["regret"])
        for span, f, m in zip(spans.tolist(), full, mass, strict=True):
            shares = np.array([f, m, max(f - m, 0)]) / group
            sums[layer, head // group, span] = sums.get((layer, head // group, span), 0) + shares
            every = reader.oracle_head(layer, head)
            history = every[every["span"] == span]
            found = history[history["step"] == record.step]
            np.testing.assert_allclose(found[["full", "mass"]], [[f, m]], atol=ATOL)
    assert len(triples) == len(sums)
    assert list(triples["regret"]) == sorted(triples["regret"], reverse=True)
    for row in triples.itertuples(index=False):
        want = sums[int(row.layer), int(row.kv_head), int(row.span)]
        np.testing.assert_allclose([row.full, row.mass, row.regret], want, atol=2 * ATOL)


def test_regret_by_step_names_the_head_that_missed_most(tmp_path: Path) -> None:
    sizes = (2, 4, 2, 1)
    records = [
        make_step(np.random.default_rng(step), step, sizes, skip={"regret", "reference_regret"}) for step in range(3)
    ]
    for step in (0, 2):
        records[step].head["regret"] = np.array([[0.25, np.nan, 0.5, 0.0], [np.nan, 0.5, 0.125, 0.0]], np.float32) / (
            step + 1
        )
    with write(tmp_path, records, sizes) as reader:
        assert "regret" in reader.metrics()
        got = reader.regret_by_step()
        assert list(got["step"]) == [0, 2]
        np.testing.assert_allclose(got["regret_max"], stored(np.array([0.5, 0.5 / 3])))
        np.testing.assert_allclose(got["regret_mean"], [1.375 / 6, 1.375 / 18], atol=1e-4)
        assert got[["layer", "q_head"]].to_numpy().tolist() == [[0, 2], [0, 2]]
        table = reader.head_table()
        np.testing.assert_allclose(table["regret_max"], [0.25, np.nan, 0.5, 0, np.nan, 0.5, 0.125, 0])


@pytest.mark.parametrize(("level", "kept"), [("summary", False), ("heads", False), ("spans", True)])
def test_loss_is_kept_at_every_level_and_full_attention_with_the_spans(tmp_path: Path, level: str, kept: bool) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, steps=8, spans=12, trace_level=level, forced=True)
    with TraceReader.open(tmp_path, uid) as reader:
        assert len(reader.loss()) == 8
        assert reader.oracle_step(0).empty is not kept
        assert reader.effects(6).empty is not kept
        assert (reader.span_keys(0, 0) is not None) is kept
        assert "regret" in reader.metrics()
        assert reader.regret_by_step().empty is (level == "summary")


def test_a_made_up_run_loses_where_it_is_told_to(tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 4, 4, 2, steps=24, spans=12, loss_step=9, oracle={"every": 3, "layers": [1, 3]})
    with TraceReader.open(tmp_path, uid) as reader:
        loss = reader.loss()
        assert list(loss["step"]) == list(range(10))
        assert list(loss["agrees"]) == [True] * 9 + [False]
        assert sorted(reader.regret_by_step()["step"]) == list(range(0, 24, 3))
        assert set(reader.oracle_step(9)["layer"]) == {1, 3}
        assert np.isfinite(reader.head_cube("regret")).any((0, 2)).tolist() == [False, True, False, True]
        one = reader.oracle(9, 3, 0)
        assert one["full"].sum() + reader.oracle_tail(9, 3, 0) == pytest.approx(1, abs=1e-3)
        known = dict(zip(*reader.head_spans(9, 3, 0)[["span", "mass"]].to_numpy().T, strict=True))
        for row in one.itertuples(index=False):
            if row.span in known:
                assert row.mass == pytest.approx(known[row.span], abs=5e-3)


def test_a_run_without_a_lens_has_none(tmp_path: Path) -> None:
    with TraceReader.open(tmp_path, write_synthetic(tmp_path, 2, 4, 2, steps=4, spans=12, lens=False)) as reader:
        assert reader.loss().empty
        assert reader.oracle_step(0).empty
        assert reader.triples(0).empty
        assert reader.effects(3).empty
        assert np.isnan(reader.oracle_tail(0, 0, 0))
        assert reader.span_keys(0, 0) is None
        assert "regret" not in reader.metrics()
        assert isinstance(reader.regret_by_step(), pd.DataFrame)
        assert reader.regret_by_step().empty


@pytest.mark.parametrize("fault", ["shape", "gap", "tail", "span"])
def test_full_attention_that_does_not_fit_fails_the_run_in_one_sentence(tmp_path: Path, fault: str) -> None:
    record = make_step(np.random.default_rng(0), 0, (1, 2, 1, 1))
    oracle = Oracle(np.array([[[1], [2]]]), np.full((1, 2, 1), 0.5), np.full((1, 2, 1), 0.25), np.full((1, 2), 0.5))
    if fault == "shape":
        oracle.mass = oracle.mass[:, :1]
    if fault == "gap":
        oracle.full[0, 1] = np.nan
    if fault == "tail":
        oracle.tail_full[0, 1] = np.nan
    if fault == "span":
        oracle.span[0, 0] = 70_000
    record = replace(record, oracle=oracle)
    with pytest.raises(TraceError) as refused:
        write(tmp_path, [record], (1, 2, 1, 1))
    one_sentence(refused.value)


def test_span_keys_that_do_not_fit_fail_the_run_in_one_sentence(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    writer.begin(RunMeta(layers=2, q_heads=2, kv_heads=1))
    keys = SpanKeys("pre-rope", np.array([0, 1], np.int32), np.zeros((2, 2, 2, 4), np.float32))
    writer.prefill(replace(make_prefill(), span_keys=keys))
    with pytest.raises(TraceError, match="span_keys") as refused:
        writer.finish("completed", None, [], {})
    one_sentence(refused.value)


def test_a_sampled_head_without_listed_spans_keeps_its_tail(tmp_path: Path) -> None:
    oracle = make_oracle(np.random.default_rng(1), 1, 1)
    oracle.span[:], oracle.tail_full[:] = -1, 1.0
    record = replace(make_step(np.random.default_rng(0), 0, (1, 1, 1, 1)), oracle=oracle)
    with write(tmp_path, [record], (1, 1, 1, 1)) as reader:
        assert reader.oracle(0, 0, 0).empty
        assert reader.oracle_tail(0, 0, 0) == 1


def _masses(reference: bool) -> Oracle:
    """Two query heads of one KV head: span 1 has most own-query mass, span 2 most of full KV's own, none is read."""
    full, own = np.array([[[0.1, 0.6]] * 2], np.float32), np.array([[[0.7, 0.2]] * 2], np.float32)
    tail, tokens = np.array([[0.2, 0.2]], np.float32), np.array([[[3], [3]]], np.int32)
    recorded = Oracle(
        np.array([[[1, 2]] * 2], np.int32), own, np.zeros_like(own), 1 - own.sum(-1), own, tokens - 2, own[..., :1]
    )
    if not reference:
        return recorded
    return replace(
        recorded,
        reference=full,
        tail_reference=tail,
        reference_unread=full,
        reference_lost_pos=tokens,
        reference_lost_mass=full[..., 1:],
    )


@pytest.mark.parametrize("reference", [True, False])
def test_full_kvs_own_mass_ranks_where_it_was_recorded(tmp_path: Path, reference: bool) -> None:
    sizes = (1, 2, 1, 1)
    step = replace(make_step(np.random.default_rng(0), 0, sizes, skip={"corrected"}), oracle=_masses(reference))
    step.head["regret"] = np.array([[0.9, 0.1]], np.float32)
    step.head["reference_regret"] = np.array([[0.2, 0.8] if reference else [np.nan] * 2], np.float32)
    with write(tmp_path, [step], sizes) as reader:
        assert reader.has_reference_masses() is reference
        most = reader.triples(0).iloc[0]
        assert int(most["span"]) == (2 if reference else 1)
        np.testing.assert_allclose(
            most[["full", "own"]].astype(float), [0.6, 0.2] if reference else [0.7, 0.7], atol=ATOL
        )
        listed = reader.oracle(0, 0, 0)
        assert listed["span"].tolist() == ([2, 1] if reference else [1, 2])
        np.testing.assert_allclose(listed["own_regret"], [0.2, 0.7] if reference else [0.7, 0.2], atol=ATOL)
        np.testing.assert_allclose(listed["regret"], [0.6, 0.1] if reference else [0.7, 0.2], atol=ATOL)
        np.testing.assert_allclose(listed["reference"], [0.6, 0.1] if reference else [np.nan] * 2, atol=ATOL)
        np.testing.assert_allclose(reader.oracle_tail(0, 0, 0), 0.2 if reference else 0.1, atol=ATOL)
        holes = reader.holes(0.01).set_index("span")["mass"]
        np.testing.assert_allclose(holes[[1, 2]], [0.1, 0.6] if reference else [0.7, 0.2], atol=ATOL)
        assert reader.lost_tokens(0)["pos"].tolist() == [3, 3] if reference else [1, 1]
        assert reader.regret_by_step()["q_head"].tolist() == [1 if reference else 0]


def test_the_export_has_both_masses_and_says_whose_a_lost_token_is(tmp_path: Path) -> None:
    sizes = (1, 2, 1, 1)
    step = replace(make_step(np.random.default_rng(0), 0, sizes, skip={"corrected"}), oracle=_masses(True))
    with write(tmp_path, [step], sizes) as reader:
        frames = {}
        for name in ("oracle", "lost-tokens"):
            export(reader, name, "parquet", tmp_path / name)
            frames[name] = pd.read_parquet(tmp_path / name)
    masses = frames["oracle"].query("q_head == 0 and span == 2").iloc[0]
    figures = masses[["own_query_mass", "reference_mass", "own_query_regret", "reference_regret"]].astype(float)
    np.testing.assert_allclose(figures, [0.2, 0.6, 0.2, 0.6], atol=ATOL)
    lost = frames["lost-tokens"].query("q_head == 0").set_index("query")["pos"]
    assert lost.to_dict() == {"own": 1, "reference": 3}
