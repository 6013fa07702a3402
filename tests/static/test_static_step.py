"""The static step generates what the engine generates and moves what the engine moves: token for token, byte for byte,
step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from static_support import CASES, FETCHING, Case, decoder
from support import ListSink, makes, task_prompt

from kvlens.engine.engine import Engine, Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.gpu.static import StaticDecoder
from kvlens.lab.gpu.static.refusal import StaticRefused
from kvlens.methods import registry
from kvlens.methods.base import Method
from kvlens.methods.full import FullKV
from kvlens.rows import MASS_COLUMNS

STEPS = 20


@pytest.fixture(scope="module")
def asked(demo: Any) -> tuple[Any, ReadPrompt]:
    prompt, _ = task_prompt(demo, "multikey", 700, max_new=STEPS)
    return prompt, Engine(demo).read(prompt)


@pytest.fixture(scope="module")
def engine_runs(demo: Any, asked: tuple[Any, ReadPrompt]) -> dict[str, Any]:
    return {}


def engine_run(demo: Any, asked: tuple[Any, ReadPrompt], known: dict[str, Any], case: Case) -> tuple[Any, ListSink]:
    if case.id not in known:
        sink = ListSink()
        options = Options(max_new=STEPS, ignore_eos=True)
        known[case.id] = (
            Engine(demo).run(asked[0], *case.arguments(), options, sink, read=asked[1], keep_logits=True),
            sink,
        )
    return known[case.id]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_same_tokens_masses_and_bytes_as_the_engine(demo: Any, asked: Any, engine_runs: Any, case: Case) -> None:
    expected, sink = engine_run(demo, asked, engine_runs, case)
    static = decoder(demo, asked[0], case, STEPS, ring=7, read=asked[1])
    try:
        token, ids = asked[0].ids[-1], []
        for step in range(STEPS):
            logits = static.step(token)
            torch.testing.assert_close(logits.float(), expected.logits[step], atol=1e-4, rtol=1e-4)
            token = int(logits.argmax())
            ids.append(token)
        assert ids == expected.ids
        assert static.session.ring is not None
        told, moved = static.session.ring.collect(), static.moved_bytes()
    finally:
        static.close()
    assert len(told.mass) == len(sink.steps) == STEPS
    for step, record in enumerate(sink.steps):
        for role, name in enumerate(MASS_COLUMNS):
            np.testing.assert_allclose(told.mass[step, ..., role], record.head[name], atol=1e-5)
        np.testing.assert_array_equal(told.attended[step], record.kv["attended_tokens"])
        np.testing.assert_array_equal(told.moved[step, 0], record.kv["blocking_bytes"])
        np.testing.assert_array_equal(told.moved[step].sum(0), record.kv["h2d_bytes"])
    assert int(moved.sum()) == sum(t.bytes for record in sink.steps for t in record.transfers if t.direction == "h2d")
    np.testing.assert_array_equal(moved.numpy(), told.moved.sum(0))
    if case.method in FETCHING:
        assert moved.sum() > 0, "a budget at which nothing is fetched proves nothing"
    elif case.method in ("streaming_llm", "compresskv", "chess"):
        assert (told.attended[-1] < len(asked[0].ids)).any()


@pytest.mark.parametrize("case", [CASES[i] for i in (1, 2, 5, 8, 11)], ids=lambda case: case.id)
def test_forced_tokens_and_no_instruments(demo: Any, asked: Any, engine_runs: Any, case: Case) -> None:
    """Without rings the run is the same; forced with other tokens than its own, it chooses what the engine chooses."""
    plain = decoder(demo, asked[0], case, STEPS, read=asked[1])
    try:
        assert plain.decode(STEPS) == engine_run(demo, asked, engine_runs, case)[0].ids
    finally:
        plain.close()
    forced = tuple((7 * i) % 200 + 3 for i in range(STEPS))
    options = Options(forced=forced)
    expected = Engine(demo).run(asked[0], *case.arguments(), options, read=asked[1], keep_logits=True)
    static = decoder(demo, asked[0], case, STEPS, read=asked[1])
    try:
        token = asked[0].ids[-1]
        for step in range(STEPS):
            logits = static.step(token)
            assert int(logits.argmax()) == int(expected.logits[step].argmax())
            token = forced[step]
    finally:
        static.close()


def test_every_method_that_says_it_can_run_static_is_tried() -> None:
    assert {case.method for case in CASES} == {name for name in makes() if registry()[name].static_ready}


def test_a_method_that_does_not_say_so_is_refused_in_one_sentence(demo: Any, asked: Any) -> None:
    class Eager(FullKV):
        title = "Ragged"
        static_ready = False

    with pytest.raises(StaticRefused) as caught:
        StaticDecoder(demo, asked[0], Eager, Eager.Parameters(), read=asked[1])
    assert caught.value.values == {"method": "Ragged", "reason": "not_static_ready"}
    assert not Method.static_ready, "nobody inherits it without saying so"


def test_the_engines_loop_chooses_stops_and_counts_for_a_static_step(demo: Any, asked: Any) -> None:
    """Drawn tokens, a stop text and log-probabilities are the engine's: one loop, whatever makes the step."""
    method, params, budget = CASES[8].arguments()
    options = Options(max_new=STEPS, seed=3, temperature=1.5, top_p=0.9, ignore_eos=True)
    expected = Engine(demo).run(asked[0], method, params, budget, options, read=asked[1])
    static = StaticDecoder(demo, asked[0], method, params, budget, options, read=asked[1])
    try:
        assert static.decode(STEPS) == expected.ids
        result = static.generations[0].result
        np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=1e-3)
        assert (result.stopped, len(result.step_s)) == ("length", STEPS)
    finally:
        static.close()
    text = demo.tokenizer.decode(expected.ids[4:6])
    options = replace(options, stop=(text,))
    expected = Engine(demo).run(asked[0], method, params, budget, options, read=asked[1])
    static = StaticDecoder(demo, asked[0], method, params, budget, options, read=asked[1])
    try:
        assert static.decode(STEPS) == expected.ids
        assert static.generations[0].result.stopped == expected.stopped == "stop"
        assert static.steps == len(expected.ids) < STEPS
    finally:
        static.close()
