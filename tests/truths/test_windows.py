"""Models with sliding windows, a cap on scores and sink logits: full KV against the stock model past every border, and
the truths of every run for every registered method."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import ListSink, Prompts, method_of, preset_of, random_prompt, run, share_of

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.checking import truths
from kvlens.checking.models import WINDOWED, random_windowed
from kvlens.checking.stock import generated
from kvlens.engine.effect import FullAttention
from kvlens.engine.engine import Engine, Options
from kvlens.engine.hf_attention import SessionCache, forms_of
from kvlens.engine.unread import Unread
from kvlens.holds import Drop, Hold
from kvlens.recording import freezing
from kvlens.recording.selfcheck import MASSES
from kvlens.runs import modelcheck, readings

FAMILIES = tuple(WINDOWED)
HYBRID = "gemma3_text"
W, NEW, N = 48, 12, 300
ROUNDING = 1e-4
"""largest difference of logits from another order of the same sums"""
METHODS = [(name, FAMILIES[number % len(FAMILIES)]) for number, name in enumerate(methods.registry())]
"""each method with a family; every family has methods of many kinds"""


@cache
def model_of(family: str) -> Any:
    torch.set_num_threads(1)
    return random_windowed(family)


@cache
def prompts_of(family: str) -> Prompts:
    return Prompts(model_of(family))


@cache
def full_of(family: str) -> Any:
    return run(model_of(family), random_prompt(N, seed=3, stop=9), "full", max_new=NEW, keep_logits=True)


def recorded(family: str, name: str, **settings: Any) -> tuple[Any, ListSink]:
    sink, prompt = ListSink(), random_prompt(N, seed=3, stop=9)
    return run(model_of(family), prompt, name, sink=sink, coverage=True, max_new=NEW, **settings), sink


@pytest.mark.parametrize("length", [W - NEW, W - 1, W, W + 1, 3 * W])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_equals_generate_past_every_border_whole_and_in_chunks(family: str, length: int) -> None:
    model, prompt = model_of(family), random_prompt(length, seed=length)
    expected = generated(model.model, prompt.ids, NEW)
    for chunk in (0, 7, W + 5):
        assert run(model, prompt, "full", max_new=NEW, prefill_chunk=chunk).ids == expected, chunk


@pytest.mark.parametrize(("name", "family"), METHODS)
def test_every_truth_holds_where_layers_have_windows(name: str, family: str) -> None:
    model, prompt, full = model_of(family), random_prompt(N, seed=3, stop=9), full_of(family)
    own = {"preset": preset_of(name), "overrides": method_of(name).untrained, "keep_logits": True}
    limited = own | {"budget": share_of(name, "0.7")}
    try:
        result, sink = recorded(family, name, **limited)
    except BudgetInfeasible as refused:  # some methods need more than that of so short a prompt
        limited["budget"] = f"{refused.smallest}B"
        result, sink = recorded(family, name, **limited)
    plain = run(model, prompt, name, max_new=NEW, **limited)
    assert result.ids == plain.ids
    assert truths.same_logits(result.logits, plain.logits) is None
    assert truths.masses_add_up(sink.steps, model.shape) is None
    assert truths.decisions_agree(sink.steps, model.shape) is None
    assert truths.spans_partition(sink) is None
    assert truths.ledger_bytes(sink) is None
    assert truths.bytes_add_up(sink.steps, model.shape) is None
    assert all(check.passed for check in result.checks), result.checks
    _, again = recorded(family, name, read=prompts_of(family).read(prompt, name), **limited)
    assert truths.same_trace(sink, again) is None
    if method_of(name).exact_without_budget:
        forced = run(model, prompt, name, forced=tuple(full.ids), **own)
        assert truths.same_logits(full.logits, forced.logits, ROUNDING) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_full_attention_is_the_stock_models(family: str) -> None:
    """The oracle's mass by span and the mass of the run itself, against transformers' own attention weights."""
    model, prompt = model_of(family), random_prompt(N, seed=3, stop=9)
    _, sink = recorded(family, "full", oracle="every=1")
    fed = [*prompt.ids, *full_of(family).ids[: NEW - 1]]
    model.model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = torch.stack(model.model(torch.tensor([fed]), output_attentions=True).attentions)[:, 0, :, -1]
    model.model.set_attn_implementation("kvlens")
    assert sink.prefilled is not None
    last = sink.steps[-1]
    assert last.oracle is not None
    spans = {row.span: slice(row.tok_start, row.tok_end) for row in sink.prefilled.spans if row.kind != "window"}
    for tables, masses in ((last.top_span, last.top_mass), (last.oracle.span, last.oracle.full)):
        listed = 0
        for place in np.ndindex(tables.shape):
            if tables[place] in spans:
                stock = float(weights[place[0], place[1], spans[int(tables[place])]].sum())
                assert masses[place] == pytest.approx(stock, abs=2e-5)
                listed += 1
        assert listed > 50
    rest = 1 - weights.sum(-1).numpy()
    np.testing.assert_allclose(last.head["mass_mean"], rest, atol=2e-5)
    assert (rest.max() > 0.1) == (family == "gpt_oss"), "a sink logit takes much, and nothing else takes anything"


def test_a_sink_logits_share_is_not_what_the_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that lost a tenth fail the self-check though a sink logit takes a share."""
    shares = freezing.attention_shares

    def damaged(*given: Any) -> Any:
        weights, sink = shares(*given)
        return 0.9 * weights, sink

    monkeypatch.setattr(freezing, "attention_shares", damaged)
    checks = {check.name: check for check in recorded("gpt_oss", "snapkv", preset=preset_of("snapkv"))[0].checks}
    assert not checks[MASSES].passed
    assert checks[MASSES].value > 0.01


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_a_pass_with_gradients_attends_as_the_stock_model(family: str) -> None:
    model, prompt = model_of(family), random_prompt(N, seed=3, stop=9)
    read, full = Engine(model).read(prompt), full_of(family)
    nothing = Unread(torch.zeros(NEW, N + NEW, dtype=torch.long), 0, torch.zeros(NEW, 9, 99, 1))
    forms = forms_of(model.model, model.shape.bound(N + NEW))
    session = FullAttention.continue_from(read, nothing, 0.0, forms)
    cache = SessionCache(session, model.shape.layers)
    with torch.no_grad():
        fed = torch.tensor([[prompt.ids[-1], *full.ids[:-1]]])
        logits = model.model(input_ids=fed, past_key_values=cache, use_cache=True).logits[0]
    assert truths.same_logits(full.logits, list(logits), ROUNDING) is None


def test_a_layer_with_a_window_holds_its_window_and_misses_nothing() -> None:
    model = model_of(HYBRID)
    result, sink = recorded(HYBRID, "snapkv", oracle="every=1", budget="0.8", preset=preset_of("snapkv"))
    shape = model.shape
    kept = [layer for layer, window in enumerate(shape.windows) if window]
    acted = [layer for layer, window in enumerate(shape.windows) if not window]
    assert len(kept) == 4
    for step in sink.steps:
        assert (step.kv["attended_tokens"][kept] == W).all()
        assert (step.kv["resident_bytes"][kept] >= W * shape.head_token_bytes).all()
        assert step.oracle is not None
        assert step.head["unread"][kept].max() == 0
        assert step.head["regret"][kept].max() < 1e-5
        np.testing.assert_allclose(step.head["coverage"][kept], 1, atol=1e-5)
        lost = step.oracle.lost_pos
        assert lost is not None
        assert (lost[kept] == -1).all()
    assert sink.steps[-1].head["unread"][acted].max() > 0.1, "the method dropped what the other layers wanted"
    events = [event for event in sink.prefilled.events if event.kind == "evict" and event.layer in kept]  # type: ignore[union-attr]
    assert {event.layer for event in events} == set(kept), "what is older than a window is gone there"
    assert result.peak_bytes <= shape.full_kv_bytes(N + NEW)


def test_what_a_window_does_not_show_is_not_missed_where_every_layer_has_one() -> None:
    _, sink = recorded("mistral", "streaming_llm", oracle="every=1", budget="0.8", overrides={"recent": 16})
    for number, step in enumerate(sink.steps):
        assert step.oracle is not None
        lost = step.oracle.lost_pos
        assert lost is not None
        assert lost[lost >= 0].min() > N - 1 + number - W
        np.testing.assert_allclose(step.oracle.full.sum(-1) + step.oracle.tail_full, 1, atol=1e-4)


def test_estimates_of_a_stored_prompt_count_all_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt store holds every token of every layer, whatever the windows."""
    engine = Engine(model_of("mistral"))
    tokens, shape = 4 * W, engine.loaded.shape
    prepared = SimpleNamespace(engine=engine, prompt=random_prompt(tokens, seed=1))
    planned = SimpleNamespace(method=SimpleNamespace(needs=SimpleNamespace(received=False)))
    assert readings._size(prepared, planned) == tokens * shape.token_bytes  # type: ignore[arg-type]
    assert shape.full_kv_bytes(tokens) < tokens * shape.token_bytes / 3
    needed = 3 * (tokens + modelcheck.NEW) * shape.token_bytes
    monkeypatch.setattr(modelcheck, "_free_bytes", lambda device: needed)
    assert not modelcheck._refusal(engine, tokens)
    monkeypatch.setattr(modelcheck, "_free_bytes", lambda device: needed - 1)
    assert modelcheck._refusal(engine, tokens)


def test_a_window_that_no_position_reaches_is_no_border_of_the_check() -> None:
    loaded = model_of("mistral")
    assert modelcheck.prompt_tokens(Engine(loaded)) == (math.ceil(modelcheck.PAST * W) + 1, W)
    wide = replace(loaded, shape=replace(loaded.shape, windows=(2 * loaded.max_positions,) * loaded.shape.layers))
    assert modelcheck.prompt_tokens(Engine(wide)) == (modelcheck.SHORT, None)


def test_bytes_of_full_kv_count_windows() -> None:
    model = model_of(HYBRID)
    shape, tokens = model.shape, N + NEW
    row = shape.kv_heads * shape.head_token_bytes
    assert shape.full_kv_bytes(tokens) == (4 * W + 2 * tokens) * row
    assert shape.full_kv_bytes(W - 5) == 6 * (W - 5) * row
    context = Engine(model).context(random_prompt(W - NEW, seed=1), None, Options(max_new=NEW))
    assert context.shape.windows == ()
    full = recorded(HYBRID, "full")[0]
    assert shape.full_kv_bytes(tokens) <= full.peak_bytes < 1.1 * shape.full_kv_bytes(tokens)
    alike = recorded("mistral", "full")[0]
    assert alike.peak_bytes < 1.2 * model_of("mistral").shape.full_kv_bytes(tokens)


@pytest.mark.parametrize("name", ["snapkv", "streaming_llm", "h2o"])
@pytest.mark.parametrize("family", ["mistral", HYBRID])
def test_a_run_with_windows_keeps_to_its_budget(family: str, name: str) -> None:
    """Where every layer has a window, what the windows hide takes no bytes beside the budget."""
    prompt, sink, share = random_prompt(N, seed=3, stop=9), ListSink(), share_of(name, "0.7")
    model, options = model_of(family), {"max_new": NEW, "preset": preset_of(name)}
    limit = Budget.parse(share).bytes(model.shape, N + NEW)
    assert limit is not None
    try:
        result = run(model, prompt, name, sink=sink, budget=share, **options)
    except BudgetInfeasible as refused:
        limit = refused.smallest
        result = run(model, prompt, name, sink=sink, budget=f"{limit}B", **options)
    assert result.peak_bytes <= limit


@pytest.mark.parametrize("name", ["snapkv", "h2o", "quest"])
def test_the_smallest_feasible_budget_counts_the_windows(name: str) -> None:
    settings = {"preset": preset_of(name)}
    with pytest.raises(BudgetInfeasible) as refused:
        recorded(HYBRID, name, budget="2tok", **settings)
    smallest = refused.value.smallest
    shape = model_of(HYBRID).shape
    assert smallest > 4 * W * shape.kv_heads * shape.head_token_bytes
    assert recorded(HYBRID, name, budget=f"{smallest}B", **settings)[0].peak_bytes <= smallest
    with pytest.raises(BudgetInfeasible):
        recorded(HYBRID, name, budget=f"{smallest - 1}B", **settings)


def test_holds_act_on_other_layers_and_drops_on_all() -> None:
    model = model_of(HYBRID)
    everywhere = tuple((layer, head) for layer in range(6) for head in range(2))
    windowed = tuple(pair for pair in everywhere if model.shape.windows[pair[0]])
    settings = {
        "budget": "0.9",
        "preset": preset_of("snapkv"),
        "keep_logits": True,
        "forced": tuple(full_of(HYBRID).ids),
    }
    plain = recorded(HYBRID, "snapkv", **settings)[0]
    held = recorded(HYBRID, "snapkv", holds=(Hold(1, 0, N, everywhere),), **settings)[0]
    assert truths.same_logits(full_of(HYBRID).logits, held.logits, ROUNDING) is None, "all that a layer may see is held"
    in_windows = recorded(HYBRID, "snapkv", holds=(Hold(1, 0, N, windowed),), **settings)[0]
    assert truths.same_logits(plain.logits, in_windows.logits) is None
    dropped = recorded(HYBRID, "snapkv", drops=(Drop(1, N - 20, N - 10, windowed),), **settings)[0]
    assert truths.same_logits(plain.logits, dropped.logits, 1e-2) is not None
