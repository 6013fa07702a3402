"""What `make oracle` compares and what it last found; kvpress itself is not needed here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.oracle import Made, agrees, laid_beside
from benchmarks.oraclecases import CASES, INSIDE
from benchmarks.oracleforms import WINDOW, Case, N

ROOT = Path(__file__).resolve().parents[2]


def made(case: Case, seed: int = 0) -> Made:
    """Both sides alike: four layers, two heads, the best 59 of scores that a press leaves as means."""
    score = np.random.default_rng(seed).random((4, 2, N - (not case.peeks)))
    kept = np.zeros(score.shape, bool)
    np.put_along_axis(kept, np.argsort(-score)[..., :59], True, -1)
    return Made(score, kept)


def test_a_score_or_a_token_that_is_off_is_found() -> None:
    case = next(case for case in CASES if case.name == "snapkv")
    theirs = made(case)
    mine = Made(theirs.score * WINDOW, theirs.kept.copy())
    assert agrees(laid_beside(case, mine, theirs))
    assert not agrees(laid_beside(replace(case, times=1.0), mine, theirs))
    off = Made(mine.score.copy(), mine.kept)
    off.score[2, 1, 40] *= 1.001
    assert not agrees(laid_beside(case, off, theirs))
    off.score[2, 1, 40] = np.nan
    assert agrees(laid_beside(case, off, theirs)), "what a method does not rank is not compared"
    swapped = Made(mine.score, mine.kept.copy())
    swapped.kept[3, 0, [np.argmax(theirs.kept[3, 0]), np.argmin(theirs.kept[3, 0])]] ^= True
    row = laid_beside(case, swapped, theirs)
    assert (row["kept"], row["kept_there"], row["kept_by_both"]) == (472, 472, 471)
    assert not agrees(row)
    assert agrees(laid_beside(replace(case, expected="differs"), swapped, theirs))
    assert not agrees(laid_beside(replace(case, expected="differs"), mine, theirs)), "a departure that is none is told"


def test_chunks_and_keys_are_compared_as_they_are_meant() -> None:
    chunked = next(case for case in CASES if case.chunk)
    theirs, before = made(chunked), N - WINDOW
    means = theirs.score[..., :before].sum(1, keepdims=True).reshape(4, 1, -1, chunked.chunk).mean(-1) * chunked.times
    score = np.full((4, 2, N), np.nan)
    score[..., :before] = np.repeat(means, chunked.chunk, -1)
    assert agrees(laid_beside(chunked, Made(score, theirs.kept), theirs))
    score[:, :, 16:32] += 0.01
    assert not agrees(laid_beside(chunked, Made(score, theirs.kept), theirs))
    streaming = next(case for case in CASES if case.method == "streaming_llm")
    plain = made(streaming)
    keys = np.random.default_rng(1).standard_normal((2, 59, 24))
    theirs = replace(plain, keys=keys)
    assert agrees(laid_beside(streaming, replace(plain, keys=keys + 1e-6), theirs))
    assert not agrees(laid_beside(streaming, replace(plain, keys=keys + 1e-3), theirs))


def test_what_was_found_last_is_committed_and_agrees() -> None:
    found = json.loads((ROOT / "kvlens/lab/results/oracle.json").read_text(encoding="utf-8"))
    assert found["agrees"] is True
    asked = [(case.method, case.params) for case in CASES]
    assert [(row["method"], row["params"]) for row in found["methods"]] == asked, "cases have changed: run make oracle"
    assert [row["method"] for row in found["presses_inside"]] == [case.method for case in INSIDE]
    assert all(agrees(row) for row in (*found["methods"], *found["presses_inside"]))
    said = (ROOT / "docs/evidence/kvpress.md").read_text(encoding="utf-8")
    there, here = (found["versions"][side] for side in ("there", "here"))
    assert (
        f"Last run: {found['date']}, kvpress {there['kvpress']} on transformers {there['transformers']} against" in said
    )
    assert f"transformers {here['transformers']}, torch {here['torch'].partition('+')[0]} for both" in said


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "chunkkv", "keydiff", "adakv", "tova", "expected_attention"])
def test_every_method_that_kvpress_has_is_compared(name: str) -> None:
    assert any(case.method == name and case.expected == "equal" for case in CASES)
