"""SeKV with KV heads that keep every token, and without coarse entries: outputs, places, bytes, and what is logged."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import ListSink, run, task_prompt
from test_sekv_method import PARAMS, SHAPE, Trial, tensor

from kvlens.budget import Budget, BudgetInfeasible
from kvlens.lab.gpu.static.decoder import StaticDecoder
from kvlens.lab.gpu.static.refusal import StaticRefused
from kvlens.methods.run_inputs import StepEnd
from kvlens.methods.sekv import layout as sekv_layout
from kvlens.methods.sekv.method import SeKV
from kvlens.methods.sekv.params import PRESETS, SeKVParameters
from kvlens.rows import MASS_COLUMNS
from kvlens.tiers.slots import ROLE

N, NEW = 90, 40
ORDER = [(1, 0), (0, 1), (1, 1), (0, 0)]
"""of the map's needle scores, best first"""


@pytest.fixture
def heads(tmp_path: Path) -> str:
    """A map of SHAPE's heads; by induction the order is the other way round."""
    needle, induction = np.zeros((2, SHAPE.layers, SHAPE.q_heads))
    for place, (layer, head) in enumerate(ORDER):
        needle[layer, head * SHAPE.group] = 0.9 - 0.1 * place
        induction[layer, head * SHAPE.group + 1] = 0.1 + 0.1 * place
    scores = {"echo": (0 * needle).tolist(), "induction": induction.tolist(), "needle": needle.tolist()}
    origin = {"layers": SHAPE.layers, "q_heads": SHAPE.q_heads, "model": "tiny"}
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({"method": "heads", "provenance": origin, **scores}))
    return str(path)


def asked(heads: str, **more: Any) -> SeKVParameters:
    """As many whole heads as a budget holds."""
    chosen = {"whole_share": 1.0, "calibration": heads, "anchor_share": 0.05, "router": "mean", **more}
    return dataclasses.replace(PARAMS, **chosen)


def share(part: float, max_new: int = NEW) -> int:
    """Bytes."""
    return int(part * SHAPE.full_kv_bytes(N + max_new))


def holding(params: SeKVParameters, count: int) -> int:
    """A budget that holds so many whole heads."""
    for part in np.arange(0.4, 1.4, 0.05):
        try:
            trial = Trial(params, N, budget=share(part), max_new=NEW).prefill()
        except BudgetInfeasible:
            continue
        trial.session.close()
        if len(whole_of(trial)) == count:
            return share(part)
    raise AssertionError(f"no budget holds {count} whole heads")


def whole_of(trial: Trial) -> list[tuple[int, int]]:
    return sorted(trial.session.memory.layout.whole)


def attended(trial: Trial, layer: int) -> np.ndarray:
    """The step's output in float64, from the step's own decisions: coarse entries by eq. 9 where there are any."""
    memory, params, shape = trial.session.memory, trial.session.method.params, trial.shape
    selection = trial.session.method.select(layer, tensor(trial.q[layer]))
    rows = [row for row in memory.spans.rows[1:] if row.kind in ("entropy", "chunk")]
    out = np.zeros((shape.q_heads, shape.head_dim))
    for head in range(shape.q_heads):
        g = head // shape.group
        keys = np.concatenate((trial.keys[layer, g], trial.k[layer, g][None]))
        values = np.concatenate((trial.values[layer, g], trial.v[layer, g][None]))
        open_, entries = np.ones(len(keys), dtype=bool), []
        for row in rows if (layer, g) not in memory.layout.whole else ():
            span, at = row.span, slice(row.tok_start, row.tok_end)
            fine = selection is not None and bool(selection.fine[g, head % shape.group, span])
            if fine and bool(memory.spans.is_hot[layer, g, span]):
                continue
            open_[at] = False
            weights = np.nan_to_num(trial.nats[at]) / np.nan_to_num(trial.nats[at]).sum()
            entries.append((weights @ keys[at], weights @ values[at], len(weights)))
        entries = entries if params.coarse else []
        scale = 1 / math.sqrt(shape.head_dim)
        logits = [keys[open_] @ trial.q[layer, head] * scale]
        logits += [np.array([key @ trial.q[layer, head] * scale + math.log(n)]) for key, _, n in entries]
        p = np.exp(np.concatenate(logits))
        out[head] = p / p.sum() @ np.concatenate([values[open_], *(value[None] for _, value, _ in entries)])
    return out


@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_outputs_against_float64(heads: str, count: int, coarse: bool) -> None:
    """Whole heads attend everything, the others what is kept, expanded or summarised."""
    params = asked(heads, coarse=coarse, form="raw", weights="surprisal", zoom_rate=1.0)
    trial = Trial(params, N, budget=holding(params, count), max_new=NEW, seed=count).prefill()
    assert whole_of(trial) == sorted(ORDER[:count])
    for step in range(NEW):
        previous = StepEnd(step - 1, N + step - 1, float(trial.rng.exponential()), 1.0) if step else None
        if previous is not None:
            trial.nats = np.append(trial.nats, previous.surprisal)
            trial.keys = np.concatenate((trial.keys, trial.k[:, :, None]), 2)
            trial.values = np.concatenate((trial.values, trial.v[:, :, None]), 2)
        out = trial.step(step, previous)
        for layer in range(SHAPE.layers):
            np.testing.assert_allclose(out[layer].numpy(), attended(trial, layer), atol=2e-4)
    assert len(trial.spans()) > len(trial.session.method._nats) // 12, "blocks have left the window"
    trial.session.close()


def test_a_layer_all_of_whose_heads_are_whole_selects_nothing(heads: str) -> None:
    params = asked(heads, form="raw")
    trial = Trial(params, N, budget=holding(params, 3), max_new=NEW).prefill()
    assert whole_of(trial) == sorted(ORDER[:3])
    trial.step(0)
    assert trial.session.method.select(1, tensor(trial.q[1])) is None
    assert trial.session.method.select(0, tensor(trial.q[0])) is not None
    trial.session.close()


@pytest.mark.parametrize("form", ["raw", "factors", "smaller"])
def test_a_whole_head_has_nothing_in_host_memory(heads: str, form: str) -> None:
    """No rows of the ledger and no units; the others have all of theirs, in bytes that are the moves'."""
    params = asked(heads, form=form, max_rank=3)
    trial = Trial(params, N, budget=holding(params, 2), max_new=NEW).prefill()
    memory, whole = trial.session.memory, whole_of(trial)
    assert len(whole) == 2
    spans = [row for row in memory.spans.rows if row.kind == "entropy"]
    rows = memory.log.take_stored()
    found = {(row.layer, row.kv_head, row.span) for row in rows}
    assert found == {(layer, head, s.span) for layer, head in ORDER if (layer, head) not in whole for s in spans}
    assert {row.form for row in rows} <= {"raw", "factors"}
    transfers = memory.take_transfers()
    assert sum(t.bytes for t in transfers) == sum(row.cold_bytes for row in rows) == memory.host.cold.bytes
    for layer, head in whole:
        assert not memory.host.cold.size[layer, head].any()
        slots = memory.hot.pool(layer, head)
        assert slots.zones.coarse == slots.zones.recall == 0
        there = slots.position[layer - slots.layers.start, head - slots.heads.start]
        assert sorted(there[there >= 0].tolist()) == list(range(N))
        assert not (slots.role == ROLE["coarse"]).any()
    trial.session.close()


@pytest.mark.parametrize("zoom", ["sync", "next", "off"])
def test_the_budget_holds_and_the_smallest_has_no_whole_heads(heads: str, zoom: str) -> None:
    params = asked(heads, zoom=zoom, coarse=False, form="raw")
    with pytest.raises(BudgetInfeasible) as refused:
        Trial(params, N, budget=1000, max_new=NEW).prefill()
    smallest = refused.value.smallest
    assert not whole_of(Trial(params, N, budget=smallest, max_new=NEW).prefill())
    for budget in (smallest, *(holding(params, count) for count in (1, 2, 3))):
        trial = Trial(params, N, budget=budget, max_new=NEW).prefill()
        memory = trial.session.memory
        held = sum(t.untyped_storage().nbytes() for t in memory.hot.tensors())
        zones = [memory.layout.zones_of(layer, head).head_bytes(SHAPE) for layer, head in np.ndindex(2, 2)]
        assert held == sum(zones)
        for step in range(NEW):
            trial.step(step, StepEnd(step - 1, N + step - 1, float(trial.rng.exponential()), 1.0) if step else None)
            assert memory.account.peak <= budget
        most = sekv_layout.whole_count(params, SHAPE, N, NEW, budget)
        assert len(whole_of(trial)) <= most
        trial.session.close()


def test_scores_of_the_map_choose(heads: str) -> None:
    for by, order in (("needle", ORDER), ("induction", ORDER[::-1])):
        params = asked(heads, whole_by=by)
        trial = Trial(params, N, budget=holding(params, 1), max_new=NEW).prefill()
        assert whole_of(trial) == [order[0]]
        trial.session.close()
    assert not whole_of(Trial(asked(heads), N, max_new=NEW).prefill()), "without a budget there are none"
    assert not whole_of(Trial(asked(heads, window=N), N, budget=share(2), max_new=NEW).prefill()), "nothing to keep"


@pytest.mark.parametrize(
    "more",
    [{}, {"form": "factors", "coarse": True, "router": "pca", "dim": 8, "max_rank": 8}, {"zoom": "next"}],
    ids=["raw", "factors", "next"],
)
def test_a_recorded_run(demo: Any, more: dict[str, Any]) -> None:
    """Recording changes nothing; masses, bytes and zooms of whole heads are told as they are."""
    prompt, _ = task_prompt(demo, "multikey", 700, max_new=24)
    sink = ListSink()
    overrides = {"whole_share": 0.5, **more}
    settings = {"budget": "0.4", "preset": "no-coarse", "overrides": overrides, "max_new": 24, "keep_logits": True}
    settings |= {"ignore_eos": True}
    recorded = run(demo, prompt, "sekv", sink=sink, coverage=True, **settings)
    plain = run(demo, prompt, "sekv", **settings)
    assert recorded.ids == plain.ids
    assert all(torch.equal(a, b) for a, b in zip(recorded.logits, plain.logits, strict=True))
    assert all(check.passed for check in recorded.checks), recorded.checks
    assert sink.prefilled is not None
    told = {row.layer: row.values for row in sink.prefilled.journal if row.name == "whole"}
    whole = np.array([told[layer] for layer in range(demo.shape.layers)]) > 0
    assert 0 < whole.sum() < whole.size
    by_query = whole.repeat(demo.shape.group, 1)
    moved = np.zeros(whole.shape)
    for transfer in (*sink.prefilled.transfers, *(t for step in sink.steps for t in step.transfers)):
        moved[transfer.layer, transfer.kv_head] += transfer.bytes
    assert not moved[whole].any()
    assert (moved[~whole] > 0).all()
    tokens = len(prompt.ids) - 1
    for at, record in enumerate(sink.steps):
        total = sum(record.head[column] for column in MASS_COLUMNS)
        np.testing.assert_allclose(total, 1, atol=1e-3)
        assert (record.kv["attended_tokens"][whole] == tokens + at + 1).all()
        assert (record.kv["attended_coarse"][whole] == 0).all()
        np.testing.assert_allclose(record.head["coverage"][by_query], 1, atol=1e-3)
        rates = record.head["zoom_rate"]
        assert np.isnan(rates[by_query]).all()
        assert np.isfinite(rates[~by_query]).all()
        each = (tokens + 24) * (demo.shape.head_token_bytes + 9)
        assert (record.kv["resident_bytes"][whole] >= each).all()
    kept = np.zeros(whole.shape, dtype=bool)
    for event in sink.prefilled.events:
        if event.kind == "kept":
            kept[event.layer, slice(None) if event.kv_head is None else event.kv_head] = True
    assert (kept == whole).all()


def test_a_static_step_refuses_whole_heads_and_shared_zones_by_code(demo: Any) -> None:
    prompt, _ = task_prompt(demo, "multikey", 400, max_new=8)
    params = SeKVParameters(**PRESETS["no-coarse"])
    with pytest.raises(StaticRefused) as caught:
        StaticDecoder(demo, prompt, SeKV, dataclasses.replace(params, whole_share=0.5), Budget.parse("0.4"))
    assert caught.value.values == {"method": "SeKV", "reason": "unequal_heads"}
    with pytest.raises(StaticRefused) as caught:
        StaticDecoder(demo, prompt, SeKV, dataclasses.replace(params, zones="model"), Budget.parse("0.4"))
    assert caught.value.values == {"method": "SeKV", "reason": "shared_zones"}
    StaticDecoder(demo, prompt, SeKV, params, Budget.parse("0.4")).close()
