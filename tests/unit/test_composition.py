"""Composed methods: they keep what the hand-written ones keep, are run as any method, and what makes no sense is
refused with a code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from support import ListSink, random_llama, random_prompt, run, task_prompt
from test_cli import kvlens
from test_kivi import rounded
from test_prompt_eviction import best

from kvlens import methods
from kvlens.checking import truths
from kvlens.engine.engine import Engine, Options
from kvlens.engine.loop import Generation
from kvlens.engine.session import Session
from kvlens.holds import Hold
from kvlens.methods.composition import SENSELESS, UNKNOWN_PART, NoComposition
from kvlens.methods.naming import display_name

N, TOKENS = 203, 37
HEADS = [(layer, kv_head) for layer in range(SHAPE.layers) for kv_head in range(SHAPE.kv_heads)]


def kept(name: str, **settings: Any) -> list[list[int]]:
    trial = Trial(name, N, 5, tokens=TOKENS, **settings)
    return [trial.lies(*head) for head in HEADS]


@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_adakv_of_snapkv_is_adakv(floor: float) -> None:
    assert kept("adakv:snapkv", window=11, floor=floor) == kept("adakv", window=11, floor=floor)
    assert kept("adakv:snapkv", window=11, floor=floor) != kept("snapkv", window=11)


@pytest.mark.parametrize("reuse", [1, 2])
def test_chunk_of_snapkv_without_pooling_is_chunkkv(reuse: int) -> None:
    settings = {"window": 11, "page": 7, "reuse": reuse}
    assert kept("chunk:snapkv", kernel=1, **settings) == kept("chunkkv", **settings)


def test_a_score_without_queries_is_shared_by_head() -> None:
    """Of a layer's best keys, all heads together, each head keeps its own."""
    each = kept("adakv:keydiff", floor=0.0)
    trial = Trial("adakv:keydiff", N, 5, tokens=TOKENS, floor=0.0)
    for layer in range(SHAPE.layers):
        scores = []
        for head in range(SHAPE.kv_heads):
            unit = trial.keys[layer, head] / np.linalg.norm(trial.keys[layer, head], axis=-1, keepdims=True)
            scores.append(-(unit @ unit.mean(0)) / np.linalg.norm(unit.mean(0)))
        order = np.argsort(-np.array(scores).ravel(), kind="stable")[: TOKENS * SHAPE.kv_heads]
        for head in range(SHAPE.kv_heads):
            assert each[layer * SHAPE.kv_heads + head] == sorted(order[order // N == head] % N)


def stays(model: Any, ids: Any, name: str, **settings: Any) -> tuple[Any, list[list[list[int]]]]:
    """The session of a prompt, and the positions that each KV head keeps of it."""
    method, options = methods.get(name), Options(max_new=2)
    context = Engine(model).context(ids, None, options)
    session = Session(method, methods.make_parameters(method, None, settings), context)
    with torch.inference_mode():
        Generation(model, ids, session, options).place(None)
    pools, kept_positions = session.memory.hot, []
    for layer in range(model.shape.layers):
        rows = []
        for head in range(model.shape.kv_heads):
            pool = pools.pool(layer, head)
            row = pool.slots(layer).position[head - pool.heads.start]
            rows.append(sorted(row[row >= 0].tolist()))
        kept_positions.append(rows)
    return session, kept_positions


@pytest.mark.parametrize(("first_stage", "epsilon"), [(0.0, 2.0), (0.5, 2.0), (1.0, 2.0), (0.5, 1e-4)])
def test_critical_weighs_the_second_half_by_the_projected_values(first_stage: float, epsilon: float) -> None:
    """KeyDiff's scores are negative: below an epsilon of 1 a larger value lowers them."""
    model, prompt = random_llama(), random_prompt(141, seed=4)
    _, plain = stays(model, prompt, "keydiff", tokens=141)
    assert plain[0][0] == list(range(140))
    method = methods.get("critical:keydiff")
    values: dict[str, torch.Tensor] = {}

    class Looked(method):  # type: ignore[misc, valid-type]
        """Keeps what it is handed."""

        def prefill_end(self, prompt: Any) -> Any:
            values["keys"], values["values"] = prompt.keys.double(), prompt.values.double()
            return super().prefill_end(prompt)

    options = Options(max_new=2)
    context = Engine(model).context(prompt, None, options)
    settings: dict[str, Any] = {"tokens": TOKENS, "first_stage": first_stage, "epsilon": epsilon}
    session = Session(Looked, methods.make_parameters(method, None, settings), context)
    with torch.inference_mode():
        Generation(model, prompt, session, options).place(None)
    shape = model.shape
    for layer, block in enumerate(model.model.model.layers):
        weight = block.self_attn.o_proj.weight.double()
        for head in range(shape.kv_heads):
            keys = values["keys"][layer, head].numpy()
            unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
            score = -(unit @ unit.mean(0)) / np.linalg.norm(unit.mean(0))
            norms = np.zeros(len(keys))
            for query_head in range(head * shape.group, (head + 1) * shape.group):
                part = weight[:, query_head * shape.head_dim : (query_head + 1) * shape.head_dim]
                norms += (values["values"][layer, head] @ part.T).abs().sum(-1).numpy() / shape.group
            first = best(score, int(TOKENS * first_stage))
            weighed = (score + epsilon) * norms
            weighed[first] = np.inf
            row = session.memory.hot.pool(layer, head).slots(layer).position[head]
            assert sorted(row[row >= 0].tolist()) == best(weighed, TOKENS)


def test_shares_by_head_go_by_the_score_and_each_head_fills_half_of_its_own_by_it() -> None:
    """adakv:critical:snapkv: budgets are AdaKV's, and stage one is half of each."""
    model, prompt = random_llama(), random_prompt(141, seed=4)
    settings = {"tokens": TOKENS, "window": 11, "floor": 0.0}
    alone = stays(model, prompt, "adakv", **settings)[1]
    both = stays(model, prompt, "adakv:critical:snapkv", **settings)[1]
    counts = [[len(head) for head in layer] for layer in alone]
    assert [[len(head) for head in layer] for layer in both] == counts
    assert len({count for layer in counts for count in layer}) > 1
    assert both != alone
    first = {"first_stage": 1.0}
    assert stays(model, prompt, "adakv:critical:snapkv", **settings, **first)[1] == alone
    for layer, heads in enumerate(counts):
        for head, count in enumerate(heads):
            best_half = {**settings, "tokens": 11 + (count - 11 + 1) // 2}
            del best_half["floor"]
            assert set(stays(model, prompt, "snapkv", **best_half)[1][layer][head]) <= set(both[layer][head])


def test_criticalkv_is_critical_of_snapkv() -> None:
    model, prompt = random_llama(), random_prompt(141, seed=4)
    settings = {"tokens": TOKENS, "window": 11}
    assert stays(model, prompt, "criticalkv", **settings)[1] == stays(model, prompt, "critical:snapkv", **settings)[1]
    assert stays(model, prompt, "criticalkv", **settings)[1] != stays(model, prompt, "snapkv", **settings)[1]


@pytest.mark.parametrize(
    ("name", "code", "part"),
    [
        ("adakv:compresskv", SENSELESS, "adakv"),
        ("adakv:headkv", SENSELESS, "adakv"),
        ("chunk:adakv:snapkv", SENSELESS, "chunk"),
        ("chunk:chunkkv", SENSELESS, "chunk"),
        ("chunk:simlayerkv", SENSELESS, "chunk"),
        ("critical:rocketkv", SENSELESS, "critical"),
        ("adakv:lagkv", SENSELESS, "adakv"),
        ("adakv:critical:finch", SENSELESS, "adakv"),
        ("scorecut:lagkv", SENSELESS, "scorecut"),
        ("scorecut:critical:snapkv", SENSELESS, "scorecut"),
        ("adakv:quest", SENSELESS, "adakv"),
        ("bits:snapkv", UNKNOWN_PART, "bits"),
        ("snapkv+adakv", UNKNOWN_PART, "adakv"),
        ("snapkv@adakv", UNKNOWN_PART, "adakv"),
        ("+kivi", UNKNOWN_PART, ""),
        ("adakv:", UNKNOWN_PART, ""),
        (f"adakv:{'x' * 64}", UNKNOWN_PART, f"adakv:{'x' * 64}"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, code: str, part: str) -> None:
    with pytest.raises(NoComposition) as raised:
        methods.get(name)
    assert (raised.value.code, raised.value.part, raised.value.name) == (code, part, name)
    assert raised.value.values == {"part": part, "reason": raised.value.reason}
    assert code not in str(raised.value)


def test_an_unknown_method_in_a_composition_is_unknown() -> None:
    with pytest.raises(methods.UnknownMethod):
        methods.get("adakv:nothing")


def test_a_composition_is_listed_and_run_as_any_method(capsys: pytest.CaptureFixture[str]) -> None:
    kvlens("methods", "adakv:critical:snapkv", "--model", "demo", "--json")
    entry = json.loads(capsys.readouterr().out)
    assert (entry["name"], entry["family"]) == ("adakv:critical:snapkv", "prompt_eviction")
    names = [parameter["name"] for parameter in entry["parameters"]]
    assert {"window", "kernel", "first_stage", "epsilon", "floor"} <= set(names)
    assert display_name("chunk:nothing", {}) == "chunk:nothing"
    assert display_name("chunk:snapkv", {}) == methods.get("chunk:snapkv").title
    model = random_llama()
    sink = ListSink()
    result = run(model, random_prompt(120, seed=1), "chunk:keydiff", sink=sink, budget="0.4", max_new=6)
    assert len(result.ids) == 6
    assert "chunk:keydiff" not in methods.registry()


def attended(trial: Trial, name: str, layer: int, head: int, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Output of a query head at the first step over what `name` keeps, its kept keys and values two bits wide."""
    kv_head = head // SHAPE.group
    positions = np.array(Trial(name, N, 5, tokens=TOKENS, window=11).lies(layer, kv_head))
    packed = positions[positions < N - 10]
    short = -len(packed) % 8
    keys, values = (x[layer, kv_head].astype(np.float32).astype(float) for x in (trial.keys, trial.values))
    whole = np.vstack([keys[packed], np.repeat(keys[packed[-1:]], short, 0)])
    few_keys, few_values = rounded(whole, 2, 0)[: len(packed)], rounded(values[packed], 2, 1)
    new = k[layer, kv_head][None].astype(np.float32)
    all_keys, all_values = np.vstack([few_keys, keys[N - 10 :], new]), np.vstack([few_values, values[N - 10 :], new])
    scores = all_keys @ q[layer, head] / SHAPE.head_dim**0.5
    weights = np.exp(scores - scores.max())
    return weights @ all_values / weights.sum()


@pytest.mark.parametrize("scorer", ["snapkv", "chunk:snapkv"])
def test_what_an_eviction_keeps_is_attended_as_the_bits_hold_it(scorer: str) -> None:
    """Ten window tokens and the step's own stay exact."""
    trial = Trial(f"{scorer}+kivi", N, 5, tokens=TOKENS, window=11, code_group=8)
    q, k = trial.step(0)
    for layer, head in np.ndindex(SHAPE.layers, SHAPE.q_heads):
        found = trial.outs[layer][0, head, 0]
        np.testing.assert_allclose(found, attended(trial, scorer, layer, head, q, k), atol=2e-3)


@pytest.mark.parametrize("name", ["snapkv+kivi", "pyramidkv+turboquant", "chunk:keydiff+kivi", "compresskv+kivi"])
def test_the_bytes_of_packed_tokens_are_those_of_the_layout_and_within_the_budget(name: str) -> None:
    budget = SHAPE.full_kv_bytes(N + 5) // 3
    settings: dict[str, Any] = {"heads": "all", "layers": "equal"} if name.startswith("compress") else {}
    trial = Trial(name, N, 5, budget=budget, **settings)
    memory = trial.session.memory
    assert memory.packed is not None
    tensors = (*memory.hot.tensors(), *memory.packed.tensors(), *memory.spans.tensors())
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert memory.layout.bytes(SHAPE) == held == memory.account.resident <= budget
    plain = Trial(name.rpartition("+")[0], N, 5, budget=budget, **settings)
    assert memory.packed.form.kept_counts[0][0] > len(plain.lies(0, 0)), "few bits make room for more tokens"


def test_packed_kept_tokens_are_recorded_and_their_errors_logged(demo: Any) -> None:
    prompt, _ = task_prompt(demo, "multikey", 300, max_new=8)
    sink = ListSink()
    run(demo, prompt, "snapkv+kivi", budget="0.3", preset="demo", max_new=8, sink=sink, coverage=True, ignore_eos=True)
    assert sink.prefilled is not None
    errors = sink.prefilled.span_heads
    assert {row.form for row in errors} == {"quantised"}
    assert all(0 < row.err_k < 1 and 0 < row.err_v < 1 for row in errors)
    for record in sink.steps:
        assert (record.head["mass_quantised"] > 0).any()
        assert (record.kv["read_bytes"] < record.kv["attended_tokens"] * demo.shape.head_token_bytes).all()


@pytest.mark.parametrize(
    ("name", "code", "part"),
    [
        ("adakv:snapkv+kivi", SENSELESS, "kivi"),
        ("quest+kivi", SENSELESS, "kivi"),
        ("rocketkv+turboquant", SENSELESS, "turboquant"),
        ("kivi:snapkv", UNKNOWN_PART, "kivi"),
    ],
)
def test_storage_that_makes_no_sense_is_refused(name: str, code: str, part: str) -> None:
    with pytest.raises(NoComposition) as raised:
        methods.get(name)
    assert (raised.value.code, raised.value.part) == (code, part)


def test_pages_are_selected_anew_only_at_the_trigger(demo: Any) -> None:
    """After every second page of sixteen tokens; in between a KV head reads the pages of the last selection."""
    prompt, _ = task_prompt(demo, "multikey", 900, max_new=70)
    places = {"trigger": "fixed", "interval": "2", "tau": "0"}
    read: dict[str, list[Any]] = {}
    for name in ("freekv@chess", "freekv"):
        sink = ListSink()
        settings = {key: value for key, value in places.items() if name != "freekv" or key == "tau"}
        run(demo, prompt, name, budget="0.4", preset="demo", max_new=70, sink=sink, ignore_eos=True, overrides=settings)
        read[name] = [[e for e in record.events if e.kind in ("recall", "prefetch")] for record in sink.steps]
        if name == "freekv@chess":
            anew = [row for record in sink.steps for row in record.journal if row.name == "selected_anew"]
    moved = [step for step, events in enumerate(read["freekv@chess"]) if events]
    assert [row.values[0] for row in anew] == [0.0, 1.0, 0.0, 1.0]
    assert {step - step % 32 for step in moved} == {0, 32, 64}
    assert all(step % 32 <= 1 for step in moved), "a prefetch lands in its step or in the next"
    assert len([step for step, events in enumerate(read["freekv"]) if events]) > 20


@pytest.mark.parametrize("name", ["snapkv@chess", "arkvale@chess", "quest@chess"])
def test_a_trigger_needs_pages_that_are_recalled(name: str) -> None:
    with pytest.raises(NoComposition) as raised:
        methods.get(name)
    assert raised.value.code == SENSELESS


@pytest.mark.parametrize("name", ["snapkv+kivi", "snapkv+turboquant"])
def test_packed_tokens_that_are_held_exactly_bring_full_attention_back(demo: Any, name: str) -> None:
    prompt, _ = task_prompt(demo, "multikey", 300, max_new=4)
    shape, n = demo.shape, len(prompt.ids) - 1
    heads = tuple((layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads))
    settings: dict[str, Any] = {"max_new": 4, "ignore_eos": True, "keep_logits": True}
    full = run(demo, prompt, "full", **settings)
    settings |= {"budget": "0.4", "preset": "demo", "forced": tuple(full.ids)}
    plain = run(demo, prompt, name, **settings)
    held = run(demo, prompt, name, holds=(Hold(1, 0, n, heads),), sink=ListSink(), **settings)
    assert truths.same_logits(held.logits, full.logits, 1e-3) is None
    assert truths.same_logits(plain.logits, full.logits, 1e-3) is not None
