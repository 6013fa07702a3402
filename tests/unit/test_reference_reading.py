"""Full KV beside a stored run: which prompt it reads, and what the trace says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlens.engine import engine, loop
from kvlens.meta import RunMeta
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText

TEXT = "The farmer carried the copper kettle to the old harbor. " * 24
OWN_PROMPT = {"positions": "cache"}
"""streaming_llm reads the prompt under attention of its own"""


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each prompt that goes through the model."""
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


def effects_read(meta: RunMeta, runs: Path) -> int:
    """Prompts that effects of a run with an exact prompt read: one where it left full KV."""
    with TraceReader.open(runs, str(meta.run_uid)) as reader:
        return int((~reader.loss()["agrees"].astype(bool)).any())


def test_an_exact_prompt_is_read_for_the_run_alone(tmp_path: Path, prefills: list[str]) -> None:
    meta, recorded = ran(tmp_path, {})
    assert recorded
    assert meta.full_kv_s is not None
    assert meta.no_reference_masses is None
    assert len(prefills) == 2 + effects_read(meta, tmp_path)  # the reference's and the run's


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
