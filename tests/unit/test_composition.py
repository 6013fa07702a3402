"""Composed methods: they keep what the hand-written ones keep, are run as any method, and what makes no sense is
refused with a code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from support import ListSink, random_llama, random_prompt, run
from test_cli import kvlens
from test_prompt_eviction import best

from kvlens import methods
from kvlens.engine.engine import Engine, Options
from kvlens.engine.loop import Generation
from kvlens.engine.session import Session
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
        rows = [pools.pool(layer, head).slots(layer).position[head] for head in range(model.shape.kv_heads)]
        kept_positions.append([sorted(row[row >= 0].tolist()) for row in rows])
    return session, kept_positions


@pytest.mark.parametrize("first_stage", [0.0, 0.5, 1.0])
def test_critical_weighs_the_second_half_by_the_projected_values(first_stage: float) -> None:
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
    settings = {"tokens": TOKENS, "first_stage": first_stage, "epsilon": 2.0}
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
            weighed = (score + 2.0) * norms
            weighed[first] = np.inf
            row = session.memory.hot.pool(layer, head).slots(layer).position[head]
            assert sorted(row[row >= 0].tolist()) == best(weighed, TOKENS)


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
        ("critical:rocketkv", SENSELESS, "critical"),
        ("adakv:quest", SENSELESS, "adakv"),
        ("bits:snapkv", UNKNOWN_PART, "bits"),
        ("snapkv+adakv", UNKNOWN_PART, "adakv"),
        ("snapkv@adakv", UNKNOWN_PART, "adakv"),
        (f"adakv:{'x' * 64}", UNKNOWN_PART, f"adakv:{'x' * 64}"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, code: str, part: str) -> None:
    with pytest.raises(NoComposition) as raised:
        methods.get(name)
    assert (raised.value.code, raised.value.part, raised.value.name) == (code, part, name)


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
