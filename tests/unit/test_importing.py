"""What a cold start leaves out: garbage collection, pandas, waiting for a hash."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlens.engine import wholeness
from kvlens.models import find, importing
from kvlens.models.errors import UnsupportedModel
from kvlens.models.importing import uncollected
from kvlens.runs import fingerprint as hashing

ROOT = Path(__file__).resolve().parents[2]


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(autouse=True)
def first_time() -> None:
    """As in a process that has imported nothing through it yet."""
    importing._settled.cache_clear()


def test_nothing_is_collected_meanwhile_and_what_was_made_is_old_afterwards() -> None:
    seen: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        seen.append(phase)

    gc.unfreeze()
    gc.collect()
    gc.callbacks.append(note)
    try:
        with uncollected():
            assert not gc.isenabled()
            made = [[] for _ in range(200_000)]  # type: ignore[var-annotated]
            with uncollected():
                pass
            assert not gc.isenabled(), "the inner one leaves it to the outer"
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
        more = [[] for _ in range(300)]  # type: ignore[var-annotated]
        assert (len(made), len(more), seen) == (200_000, 300, [])
    finally:
        gc.callbacks.remove(note)
        gc.freeze()  # as all tests have it


def test_who_had_switched_it_off_or_frozen_something_finds_it_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with uncollected():
        pass
    assert gc.get_freeze_count() >= frozen > 0
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_run_begins_without_pandas() -> None:
    code = """
import sys
import kvlens.cli.main, kvlens.cli.progress, kvlens.runs.carrying, kvlens.runs.storing
print(sorted({"pandas", "torch", "transformers"} & set(sys.modules)))"""
    assert in_a_fresh_process(code) == "[]"


def test_a_model_is_hashed_before_it_is_asked_for(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hashing._of_files.cache_clear()
    usual = hashing.fingerprint(demo)
    hashing._of_files.cache_clear()
    hashing.ahead("demo").join()
    monkeypatch.setattr(hashing.hashlib, "file_digest", None)
    assert hashing.fingerprint(demo) == usual
    hashing.ahead("no such model").join()


def test_a_hub_model_is_known_by_its_revision_and_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    monkeypatch.setattr(find, "_hub_folder", lambda name: find.located("demo"))
    monkeypatch.setattr(hashing, "_of_folder", hashed.append)
    hashing.ahead("org/model").join()
    assert find.ready("org/model") is not None
    assert not hashed
    hashing.ahead("demo").join()
    assert len(hashed) == 1


def weights(*values: float, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.tensor(values, dtype=dtype), requires_grad=False)
    return module


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_named(bad: float) -> None:
    for others in ((1.0, 2.0), (float("inf"), 1.0), (-3e38, -3e38)):
        with pytest.raises(UnsupportedModel, match="tensor weight has values that are no numbers"):
            wholeness.check_loaded(weights(bad, *others), {}, "m")


def test_weights_whose_sum_is_too_large_are_whole() -> None:
    wholeness.check_loaded(weights(3e38, 3e38, 3e38), {}, "m")
    wholeness.check_loaded(weights(*[6e4] * 64, dtype=torch.float16), {}, "m")
