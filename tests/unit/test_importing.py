"""What a cold start leaves out: garbage collection, pandas, waiting for a hash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import raises_code

from kvlens.engine import modelfiles
from kvlens.models import find
from kvlens.models.errors import UnsupportedModel

ROOT = Path(__file__).resolve().parents[2]


def printed(code: str) -> list[str]:
    """Return the lines that a process of its own prints: no other test's objects or threads are in it."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


COLLECTIONS = """
import gc
from kvlens.collecting import uncollected
phases = []
gc.set_threshold(700, 10, 10)
gc.collect()
gc.callbacks.append(lambda phase, info: phases.append(phase))
with uncollected():
    assert not gc.isenabled()
    made = [[] for _ in range(200_000)]
    with uncollected():
        pass
    assert not gc.isenabled(), "the inner one leaves it to the outer"
assert gc.isenabled()
assert gc.get_freeze_count() == 0
more = [[] for _ in range(300)]
print(len(made), len(more), phases)
more += [[] for _ in range(2_000)]
print("start" in phases)
del phases[:]
with uncollected():
    made += [[] for _ in range(200_000)]
more = [[] for _ in range(300)]
print(len(more), phases)"""
FROZEN = """
import gc
from kvlens.collecting import uncollected
mark = []
gc.freeze()
with uncollected():
    pass
print(any(thing is mark for thing in gc.get_objects()), gc.isenabled())
gc.disable()
with uncollected():
    pass
print(gc.isenabled())"""


def test_nothing_is_collected_meanwhile_and_what_was_made_is_old_afterwards() -> None:
    assert printed(COLLECTIONS) == ["200000 300 []", "True", "300 []"]


def test_who_had_switched_it_off_or_frozen_something_finds_it_so() -> None:
    """A frozen object is not among those that the collector lists."""
    assert printed(FROZEN) == ["False True", "False"]


def test_a_run_begins_without_pandas() -> None:
    code = """
import sys
import kvlens.cli.main, kvlens.cli.progress, kvlens.runs.carrying, kvlens.runs.storing
print(sorted({"pandas", "torch", "transformers"} & set(sys.modules)))"""
    assert printed(code)[-1] == "[]"


def test_a_model_is_hashed_before_it_is_asked_for(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modelfiles._of_files.cache_clear()
    usual = demo.fingerprint()
    modelfiles._of_files.cache_clear()
    modelfiles.ahead("demo").join()
    monkeypatch.setattr(modelfiles.hashlib, "file_digest", None)
    assert demo.fingerprint() == usual
    modelfiles.ahead("no such model").join()


def test_a_hub_model_is_known_by_its_revision_and_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    monkeypatch.setattr(find, "_hub_folder", lambda name: find.located("demo"))
    monkeypatch.setattr(modelfiles, "_of_folder", hashed.append)
    modelfiles.ahead("org/model").join()
    assert find.ready("org/model") is not None
    assert not hashed
    modelfiles.ahead("demo").join()
    assert len(hashed) == 1


def weights(*values: float, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.tensor(values, dtype=dtype), requires_grad=False)
    return module


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_named(bad: float) -> None:
    for others in ((1.0, 2.0), (float("inf"), 1.0), (-3e38, -3e38)):
        with raises_code("not_finite", UnsupportedModel, tensor="weight"):
            modelfiles.check_loaded(weights(bad, *others), {}, "m")


def test_weights_whose_sum_is_too_large_are_whole() -> None:
    modelfiles.check_loaded(weights(3e38, 3e38, 3e38), {}, "m")
    modelfiles.check_loaded(weights(*[6e4] * 64, dtype=torch.float16), {}, "m")
