"""A long answer: nothing on the device grows with it where a method is bounded; no log does where nobody records."""

from __future__ import annotations

import pytest
import torch
from methodtrial import SHAPE, Trial
from support import random_llama, random_prompt

from kvlens import methods
from kvlens.budget import Budget
from kvlens.engine.engine import Engine, Options
from kvlens.engine.loop import Generation
from kvlens.engine.session import Session
from kvlens.lab.studies.long_generation import WHOLE, growth, line, quarters
from kvlens.methods.base import FAMILIES
from kvlens.methods.fitting import Sizes, choose
from kvlens.tiers.slots import FREE

PROMPT, NEW = 96, 144
SHARE = 0.5
"""of full KV: fewer tokens than the answer alone has"""
LIMIT = int(SHARE * SHAPE.full_kv_bytes(PROMPT + 1 + NEW))


def fitted(name: str) -> tuple[dict[str, object], float]:
    """What the method runs with here, and what one more token of an answer takes, in tokens of KV."""
    method = methods.get(name)
    found = choose(method, None, None, method.untrained, Sizes(SHAPE, PROMPT, NEW, LIMIT))
    return {**method.untrained, **found.fitted}, growth(method, found.params, SHAPE, PROMPT, NEW)


GROWTH = {name: fitted(name)[1] for name in methods.registry() if not methods.get(name).keeps_all}
BOUNDED = {methods.get(name).family: name for name, tokens in reversed(GROWTH.items()) if tokens < WHOLE}
"""the first of each family"""


def test_a_method_states_by_its_arithmetic_whether_an_answer_stays_with_it() -> None:
    assert max(GROWTH["h2o"], GROWTH["streaming_llm"]) < 0.01, "one gives way to one"
    assert GROWTH["snapkv"] > 1, "every token of the answer is kept, and so are its tables"
    assert set(BOUNDED) == set(FAMILIES) - {"reference", "prompt_eviction", "other"}


def live(trial: Trial) -> float:
    """Slots that hold something, per layer and KV head. Bytes cannot tell: room for all is taken before step 0."""
    pools = trial.session.memory.hot.pools
    return sum(int((pool.role != FREE).sum()) for pool in pools) / SHAPE.layers / SHAPE.kv_heads


@pytest.mark.parametrize("name", BOUNDED.values())
def test_what_is_on_the_device_stays_within_the_budget_and_grows_as_the_arithmetic_says(name: str) -> None:
    trial = Trial(name, PROMPT, NEW, budget=LIMIT, text=("a", "b", "c", ". ") * (PROMPT // 4), **fitted(name)[0])
    account, seen = trial.session.memory.account, []
    assert NEW * SHAPE.token_bytes > LIMIT
    for step in range(NEW):
        trial.step(step)
        assert account.peak <= LIMIT
        seen.append(live(trial))
    _, second, _, last = map(max, quarters(seen))
    assert (last - second) / (NEW // 2) <= GROWTH[name] + 0.01


def test_slots_in_use_tell_a_method_that_keeps_its_answer() -> None:
    trial, seen = Trial(methods.REFERENCE, PROMPT, 8), []
    for step in range(8):
        trial.step(step)
        seen.append(live(trial))
    assert seen == list(range(PROMPT + 1, PROMPT + 9))


@pytest.mark.parametrize("name", ["h2o", "arkvale", "kivi"])
def test_a_run_that_nobody_records_piles_up_no_log(name: str) -> None:
    engine, prompt, options = Engine(random_llama()), random_prompt(128), Options(max_new=24, ignore_eos=True)
    limit = Budget.parse("50%")
    context = engine.context(prompt, limit, options)
    sizes = Sizes(context.shape, context.prompt_tokens, context.max_new, context.budget_bytes)
    session = Session(methods.get(name), choose(methods.get(name), None, None, {}, sizes).params, context)
    try:
        with torch.inference_mode():
            Generation(engine.loaded, prompt, session, options).go(None)
        memory = session.memory
        memory.host.arrivals.settle()
        logged = [*memory.log.take_events(), *memory.log.take_cuts(), *memory.take_transfers()]
        steps = {row.step for row in logged} | {span.born_step for span in memory.spans.take_new()}
        assert steps <= {23}, "the last step's alone"
        assert len(memory.log.take_stored()) <= context.shape.layers * context.shape.kv_heads
        assert memory.transfers.total["d2h"] > 0 or name != "arkvale", "what was counted stays counted"
    finally:
        session.close()


def test_the_last_quarter_is_told_against_the_second() -> None:
    assert quarters([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    row = {"method": "h2o", "grows": 0.0, "budget_bytes": 100, "resident_most": 90}
    row |= {"median_ms": [9, 10, 11, 12], "fast_ms": [7, 8, 8, 8]}
    row |= {"process_half": 1000, "process_last": 4000, "cold_half": 0, "cold_last": 9000}
    assert line(row) == "| H2O | 0.00 | 0.90 | 1.20 (10 to 12 ms) | 1.00 | 3 kB | 9 kB |", "neither hides the other"
    assert line({"method": "snapkv", "grows": 1.02, "refused": "x"}) == "| SnapKV | 1.02 | not run | | | | |"
