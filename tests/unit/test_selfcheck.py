"""Every self-check fails on what is no number: NaN or infinity, in the recorder's sums and in the stored rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import numpy as np
import pytest
import torch

from kvlens.engine.options import NonFiniteLogits
from kvlens.instruments import Oracle
from kvlens.recording.selfcheck import FINITE, MASSES, Tally, worse
from kvlens.recording.snapshot import Measured
from kvlens.records import SelfCheck
from kvlens.rows import MASS_COLUMNS
from kvlens.shape import KVShape
from kvlens.store.reader import TraceReader
from kvlens.store.rollup import stored_checks
from tests.support import ListSink, random_prompt, run
from tests.synthetic import write_synthetic

SHAPE = KVShape(2, 4, 2, 8, 4)
STEPS = 3
BAD = pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])


def tally(spoil: Any = None, sampled: int = 2, limit: int | None = 100, logprob: float = -0.5) -> list[SelfCheck]:
    """The checks of three sound steps, the second of which `spoil` may change."""
    ledger = SimpleNamespace(total={"h2d": 0, "d2h": 0})
    counts = Tally(SHAPE, ledger, SimpleNamespace(limit=limit))  # type: ignore[arg-type]
    for step in range(STEPS):
        heads = (SHAPE.layers, SHAPE.q_heads)
        head = {name: np.full(heads, 1 / len(MASS_COLUMNS), np.float32) for name in MASS_COLUMNS}
        head["entropy"] = np.ones(heads, np.float32)
        listed = np.zeros((*heads, 1), np.int32), np.ones((*heads, 1), np.float32), np.ones((*heads, 1), np.float32)
        oracle = Oracle(*listed, np.zeros(heads, np.float32))
        measured = Measured(head, {}, *listed[:2], np.zeros(heads, np.float32), None, 0.0, oracle, 0.0)
        if step == 1 and spoil is not None:
            measured = spoil(measured) or measured
        counts.step(limit, 50, logprob if step == 1 else -0.5)
        counts.count_step(measured, sampled)
    return counts.checks()


def failed(checks: list[SelfCheck]) -> set[str]:
    return {check.name for check in checks if not check.passed}


def test_sound_figures_pass() -> None:
    assert failed(tally()) == set()
    assert len(tally()) == 7


@BAD
def test_a_sum_of_masses_that_is_no_number_fails(bad: float) -> None:
    assert failed(tally(lambda step: dataclasses.replace(step, worst=abs(bad)))) == {MASSES}


@BAD
@pytest.mark.parametrize("column", ["entropy", "mass_window", "mass_coarse"])
def test_a_row_with_a_figure_that_is_no_number_is_missing(bad: float, column: str) -> None:
    def spoil(step: Measured) -> None:
        step.head[column][1, 2] = bad

    (check,) = [check for check in tally(spoil) if check.name == "no row is missing"]
    assert not check.passed
    assert check.value == STEPS * SHAPE.layers * SHAPE.q_heads - 1


@BAD
def test_full_attention_that_is_no_number_fails(bad: float) -> None:
    name = "full attention adds up to 1"
    assert failed(tally(lambda step: dataclasses.replace(step, oracle_worst=abs(bad)))) == {name}


def test_full_attention_that_was_to_be_measured_and_was_not_fails() -> None:
    def spoil(step: Measured) -> None:
        assert step.oracle is not None
        step.oracle.tail_full[:] = np.nan

    name = "full attention adds up to 1"
    assert failed(tally(spoil)) == {name}
    assert failed(tally(lambda step: dataclasses.replace(step, oracle=None))) == {name}
    assert name not in {check.name for check in tally(lambda step: dataclasses.replace(step, oracle=None), sampled=0)}


@BAD
def test_a_next_token_without_a_probability_fails(bad: float) -> None:
    assert failed(tally(logprob=bad)) == {FINITE}


def test_a_peak_that_is_no_number_is_not_within_the_budget() -> None:
    counts = Tally(SHAPE, None, None)  # type: ignore[arg-type]
    counts.step(100, float("nan"))  # type: ignore[arg-type]
    counts.step(None, 10**9)
    assert counts.over_budget == 1


def test_nan_is_the_worse_of_two_errors() -> None:
    assert np.isnan(worse(0.0, float("nan")))
    assert np.isnan(worse(float("nan"), 5.0))
    assert worse(0.25, 0.5) == 0.5


@BAD
@pytest.mark.parametrize("column", ["mass_window", "mass_resident"])
def test_a_stored_mass_that_is_no_number_fails(bad: float, column: str, tmp_path: Path) -> None:
    """What a step logs as NaN is stored as NULL, which a sum passes over; a whole row of it too."""
    write_synthetic(tmp_path, 2, 4, 2, 4, uid="made-up", prompt_tokens=300)
    with duckdb.connect(str(copy_of(tmp_path))) as con:
        assert all(check.passed for check in stored_checks(con))
        for value in (bad, None):
            con.begin()
            con.execute(f"UPDATE head_step SET {column} = $value WHERE step = 2 AND layer = 1", {"value": value})
            assert failed(stored_checks(con)) == {"stored_masses_sum_to_one"}
            con.rollback()
        con.execute(f"UPDATE head_step SET {', '.join(f'{name} = NULL' for name in MASS_COLUMNS)} WHERE step = 1")
        assert failed(stored_checks(con)) == {"stored_masses_sum_to_one"}


def copy_of(runs: Path) -> Path:
    """The finished file is read-only."""
    with TraceReader.open(runs, "made-up") as reader:
        assert reader.n_steps == 4
    copy = runs / "copy.duckdb"
    copy.write_bytes((runs / "made-up" / "trace.duckdb").read_bytes())
    return copy


def test_a_model_whose_weights_are_no_numbers_ends_its_run(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = tiny.model.model.layers[1].self_attn.q_proj.weight
    monkeypatch.setattr(weight, "data", torch.full_like(weight.data, torch.nan))
    with pytest.raises(NonFiniteLogits):
        run(tiny, random_prompt(40), "streaming_llm", sink=ListSink(), max_new=3, ignore_eos=True, coverage=True)
