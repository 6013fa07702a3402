"""Shares of 16-bit KV: a study with the peak that the engine alone gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvlens import methods, tasks
from kvlens.budget import Budget
from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import load
from kvlens.lab.bench.trialprompts import Prompts, Trial
from kvlens.lab.bench.trials import chosen, header
from kvlens.lab.results.formats import UNKNOWN, narrow_cell, narrow_share
from kvlens.lab.studies import kv_formats

TASK, LENGTH, BUDGET = "needle", 300, "10%"


def test_the_peak_is_that_of_the_engine_and_a_small_budget_names_its_need(tmp_path: Path) -> None:
    request = kv_formats.FormatRequest(
        model="demo", lengths=(LENGTH,), budgets=(BUDGET,), methods=("full", "snapkv", "kivi"), tasks=(TASK,)
    )
    measured = kv_formats.measure(request, tmp_path)
    full, snapkv, kivi = measured["lines"]
    assert [line["method"] for line in measured["lines"]] == ["full", "snapkv", "kivi"]
    assert full["resident_share"] >= 1
    assert kivi["needs"] > 0.1
    torch.set_num_threads(1)
    engine = Engine(load("demo", dtype=kv_formats.DTYPE))
    trial = Trial(TASK, LENGTH, 0.5, kv_formats.SEED, 0, "snapkv", BUDGET, dtype=kv_formats.DTYPE)
    prompts, method = Prompts(engine, kv_formats.SEED, ["snapkv"]), methods.get("snapkv")
    prompt, planned = prompts.prompt(trial), tasks.get(TASK).new_tokens
    options, limit = Options(kv_formats.STEPS, planned=planned), Budget.parse(BUDGET)
    choice = chosen(engine, prompt, method, header(trial, "demo"), limit, options)
    peak = engine.run(prompt, method, choice.params, limit, options).peak_bytes
    share = peak / engine.loaded.shape.full_kv_bytes(len(prompt.ids) + planned)
    assert snapkv == {
        "length": LENGTH,
        "method": "snapkv",
        "budget": BUDGET,
        "preset": choice.preset,
        "resident_share": pytest.approx(share),
    }
    assert kv_formats.measure(request, tmp_path)["lines"] == measured["lines"]


def test_a_share_is_of_the_preset_that_was_asked_for() -> None:
    """SeKV was measured with the untrained router, then with the trained one, whose table takes less."""
    needs = {preset: narrow_cell("smollm2", 1024, "sekv", "10%", preset) for preset in ("paper", "smollm2", "demo")}
    assert needs["demo"] == UNKNOWN
    assert len(set(needs.values())) == 3
    assert narrow_share("smollm2", 4096, "sekv", "20%", "paper") is not None
    assert narrow_share("smollm2", 4096, "sekv", "20%", "smollm2") is None
