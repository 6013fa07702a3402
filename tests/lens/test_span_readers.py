"""Who reads a span: masses as the oracle lists them, means over steps, maps over many prompts and their ranks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlens.lens.spanreaders import needle_spans, retrieval_heads, span_readers, step_mean
from kvlens.store.reader import TraceReader
from kvlens.tables import frames
from tests.synthetic import write_synthetic

SIZES = 2, 4, 2, 10, 6


def make(folder: Path, seed: int, **meta: Any) -> str:
    return write_synthetic(folder, *SIZES, seed=seed, needle=[[30, 60]], **meta)


def test_masses_are_those_that_the_oracle_lists(tmp_path: Path) -> None:
    with TraceReader.open(tmp_path, make(tmp_path, 1)) as reader:
        spans = needle_spans(reader)
        assert spans
        masses = span_readers(reader, spans)
        listed = reader.oracle(4, 1, 2).set_index("span")
        here = [span for span in spans if span in listed.index]
        assert masses.full[4, 1, 2] == pytest.approx(listed.loc[here, "full"].sum(), abs=1e-6)
        assert masses.mass[4, 1, 2] == pytest.approx(listed.loc[here, "mass"].sum(), abs=1e-6)
        frame = masses.frame(2, 5)
        row = frame[(frame["layer"] == 1) & (frame["q_head"] == 2)].iloc[0]
        assert row["full_mass"] == pytest.approx(np.nanmean(masses.full[2:5, 1, 2]), abs=1e-6)
        assert row["n_steps"] == np.isfinite(masses.full[2:5, 1, 2]).sum()


def test_steps_that_were_not_sampled_are_not_zero(tmp_path: Path) -> None:
    uid = make(tmp_path, 1, oracle={"every": 3, "layers": [0]})
    with TraceReader.open(tmp_path, uid) as reader:
        masses = span_readers(reader, needle_spans(reader))
        sampled = np.isfinite(masses.full)
        assert sampled[:, 0].any(axis=1).tolist() == [step % 3 == 0 for step in range(10)]
        assert not sampled[:, 1].any()
        assert np.isnan(step_mean(masses.full)[1]).all()
        assert masses.frame().set_index(["layer", "q_head"])["n_steps"][1, 0] == 0


def test_a_run_without_needle_or_full_attention_has_no_rows(tmp_path: Path) -> None:
    bare = write_synthetic(tmp_path, *SIZES, seed=1, lens=False)
    with TraceReader.open(tmp_path, bare) as reader:
        assert frames.readers(reader).empty
        assert needle_spans(reader) == ()
        with pytest.raises(ValueError, match="needle"):
            retrieval_heads([reader])


def test_maps_of_many_prompts_count_a_prompt_once_and_rank_heads(tmp_path: Path) -> None:
    uids = [make(tmp_path, seed, prompt_sha256=f"{prompt}" * 8) for seed, prompt in ((1, "a"), (2, "b"), (3, "a"))]
    with ExitStack() as stack:
        readers = [stack.enter_context(TraceReader.open(tmp_path, uid)) for uid in uids]
        stability = retrieval_heads(readers)
        maps = np.stack([step_mean(r.mass_on_spans(needle_spans(r))[0]) for r in readers[:2]])
    assert stability.runs == tuple(uids[:2])
    np.testing.assert_allclose(stability.grid("mean", 2, 4), maps.mean(0), rtol=1e-6)
    np.testing.assert_allclose(stability.grid("spread", 2, 4), maps.std(0), atol=1e-7)
    assert stability.frame["mean"].is_monotonic_decreasing
    ranks = [np.argsort(np.argsort(-each.ravel())) for each in maps]
    assert stability.correlation == pytest.approx(np.asarray(np.corrcoef(ranks))[0, 1], abs=1e-6)
    assert stability.frame["top_share"].sum() == pytest.approx(1.0), "one of eight heads is a prompt's top tenth"


def test_runs_of_two_models_have_no_common_map(tmp_path: Path) -> None:
    uids = [make(tmp_path, seed, prompt_sha256=f"{seed}", model=f"m{seed}") for seed in (1, 2)]
    with ExitStack() as stack, pytest.raises(ValueError, match="different models"):
        retrieval_heads([stack.enter_context(TraceReader.open(tmp_path, uid)) for uid in uids])
