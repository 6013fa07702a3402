"""Full KV beside a stored run: which prompt it reads, and what the trace says of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlens.engine import engine, loop, models
from kvlens.meta import RunMeta
from kvlens.runs import readings
from kvlens.runs.carrying import carry_out
from kvlens.runs.preparing import READINGS, prepare
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText

TEXT = "The farmer carried the copper kettle to the old harbor. " * 24
OWN_PROMPT = {"positions": "cache"}
"""streaming_llm reads the prompt under attention of its own"""


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each prompt that goes through the model, after the first check of the model."""
    prepare(RunRequest(model="demo"), PromptText(TEXT), lambda *told: None)
    counted: list[str] = []

    def counting(prefill: Callable[..., Any], name: str) -> Callable[..., Any]:
        return lambda *args: (counted.append(name), prefill(*args))[1]

    for module in (engine, loop):
        monkeypatch.setattr(module, "prefill", counting(module.prefill, module.__name__))
    return counted


def ran(runs: Path, overrides: dict[str, Any], **changes: Any) -> tuple[RunMeta, bool]:
    """Meta of a run of streaming_llm, and whether it has full KV's own masses."""
    asked = {"against": True, "budget": "40%", "max_new": 4, "ignore_eos": True, "trace_level": "spans"}
    request = RunRequest(model="demo", method="streaming_llm", overrides=overrides, **(asked | changes))
    uid, _, _ = carry_out(request, PromptText(TEXT), runs, lambda phase, done, total: None, lambda: False)
    with TraceReader.open(runs, uid) as reader:
        return reader.meta, reader.has_reference_masses()


def was_lost(runs: Path, uid: str) -> bool:
    """Whether the run left full KV, so that its effects were computed too."""
    with TraceReader.open(runs, uid) as reader:
        return bool((~reader.loss()["agrees"].astype(bool)).any())


def test_one_prefill_serves_reference_run_and_effects(tmp_path: Path, prefills: list[str]) -> None:
    meta, recorded = ran(tmp_path, {}, budget="10%", max_new=8)
    assert recorded
    assert was_lost(tmp_path, str(meta.run_uid))
    assert meta.full_kv_s is not None
    assert meta.no_reference_masses is None
    assert len(prefills) == 1
    assert (meta.prompt_kept, meta.prefill_s) == (True, None)


@pytest.mark.usefixtures("loaded_once")
def test_a_kept_model_is_loaded_by_no_run(tmp_path: Path, prefills: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process of runs has in memory is taken: a compared run reads the prompt once and loads nothing."""
    loads: list[str] = []
    monkeypatch.setattr(models, "resolve", lambda name, *told: loads.append(name))
    ran(tmp_path, {}, budget="40%", max_new=2)
    assert (len(loads), len(prefills)) == (0, 1)


@pytest.mark.parametrize(("free", "count"), [(1 << 40, 1), (0, 2)])
def test_free_memory_decides_whether_one_prefill_serves(
    tmp_path: Path, prefills: list[str], monkeypatch: pytest.MonkeyPatch, free: int, count: int
) -> None:
    """However large the prompt is: what a folder keeps is no limit to what memory holds."""
    monkeypatch.setattr(readings, "MOST_BYTES", 0)
    monkeypatch.setattr(readings, "host_bytes", lambda: free)
    request = RunRequest(model="demo", method="snapkv", against=True, budget="90%", max_new=2, trace_level="heads")
    carry_out(request, PromptText(TEXT), tmp_path, lambda *told: None, lambda: False)
    assert len(prefills) == count


@pytest.mark.parametrize("kept_folder", [False, True])
def test_a_budget_check_reads_the_prompt_for_all_runs(
    tmp_path: Path, prefills: list[str], monkeypatch: pytest.MonkeyPatch, kept_folder: bool
) -> None:
    if kept_folder:
        monkeypatch.setenv(READINGS, str(tmp_path / "readings"))
    phases: list[str] = []
    request = RunRequest(model="demo", method="sekv", against=True, budget="40%", max_new=4, ignore_eos=True)
    report = lambda phase, done, total: phases.append(phase)  # noqa: E731
    began = time.perf_counter()
    uid, _, _ = carry_out(request, PromptText(TEXT), tmp_path, report, lambda: False)
    whole_s = time.perf_counter() - began
    assert len(prefills) == 1
    assert {"prefill", "check", "reference"} <= set(phases)
    with TraceReader.open(tmp_path, uid) as reader, TraceReader.open(tmp_path, str(reader.meta.reference)) as full:
        kept, first = reader.meta, full.meta
    assert (kept.prompt_kept, kept.prefill_s) == (True, None)
    assert first.prompt_kept is False, "the check's reading is timed as the reference's prefill"
    assert first.prefill_s is not None
    assert first.prefill_us is not None
    assert 0 < first.prefill_us / 1e6 <= whole_s
    assert 0 < first.prefill_s <= whole_s


def test_a_check_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept, read = 0.2, engine.Engine.read

    def slow(*args: Any, **named: Any) -> Any:
        time.sleep(slept)
        return read(*args, **named)

    monkeypatch.setattr(engine.Engine, "read", slow)
    request = RunRequest(model="demo", method="sekv", against=True, budget="40%", max_new=4, ignore_eos=True)
    uid, _, _ = carry_out(request, PromptText(TEXT), tmp_path, lambda *told: None, lambda: False)
    with TraceReader.open(tmp_path, uid) as reader, TraceReader.open(tmp_path, str(reader.meta.reference)) as full:
        first = full.meta
        start_us = int(full.steps()["t_us"].iloc[0])
    assert first.prefill_s is not None
    assert first.prefill_us is not None
    assert min(first.prefill_s, first.prefill_us / 1e6) >= slept
    assert start_us >= first.prefill_us, "the clock of the run begins with its reading"


def test_a_prompt_under_other_attention_takes_the_references_reading(tmp_path: Path, prefills: list[str]) -> None:
    meta, recorded = ran(tmp_path, OWN_PROMPT)
    assert recorded
    assert meta.prefill_s is not None
    assert len(prefills) == 2
    prefills.clear()
    _, again = ran(tmp_path, OWN_PROMPT)  # the reference is stored, and its reading is gone
    assert again
    assert len(prefills) == 2


@pytest.mark.parametrize("changes", [{"against": False}, {"oracle": "off"}, {"coverage": False}])
def test_nothing_is_recorded_or_read_where_it_cannot_be_had(
    tmp_path: Path, prefills: list[str], changes: dict[str, Any]
) -> None:
    meta, recorded = ran(tmp_path, {}, **changes)
    assert not recorded
    assert (meta.full_kv_s, meta.no_reference_masses) == (None, None)
    assert len(prefills) <= 2
