"""Several sequences in one step: row by row what single decoders generate, move and tell, whatever the others in the
batch do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from static_support import CASES, FETCHING, Case, Counting, decoder
from support import random_llama, random_prompt, task_prompt
from torch._dynamo.utils import counters

from kvlens.engine.engine import Engine, Options
from kvlens.kernels.compat import INTERPRET
from kvlens.lab.gpu.static import BatchDecoder, StaticDecoder
from kvlens.methods import get

STEPS = 8
LENGTHS = (640, 640, 560)
CHOSEN = [
    *(CASES[i] for i in (0, 1, 2, 3, 5, 8, 13)),
    Case("freekv", "0.45", overrides={"recall": "all", "dense_layers": 1}),
]
"""every method; FreeKV with corrected heads, and with dense layers"""


@pytest.fixture(scope="module")
def asked(demo: Any) -> list[Any]:
    """Three prompts, the last one shorter, and what was read of them."""
    prompts = [
        task_prompt(demo, "multikey", length, seed=seed, max_new=STEPS)[0] for seed, length in enumerate(LENGTHS)
    ]
    return [(prompt, Engine(demo).read(prompt)) for prompt in prompts]


def decoders(model: Any, asked: list[Any], case: Case, steps: int = STEPS, **more: Any) -> list[StaticDecoder]:
    return [decoder(model, prompt, case, steps, read=read, **more) for prompt, read in asked]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.id)
def test_every_row_is_what_it_is_alone(demo: Any, asked: list[Any], case: Case) -> None:
    alone, batch = decoders(demo, asked, case, ring=5), BatchDecoder(decoders(demo, asked, case, ring=5))
    try:
        ids = [one.decode(STEPS) for one in alone]
        assert batch.decode(STEPS) == ids
        assert len({tuple(row) for row in ids}) == len(asked), "prompts whose answers are alike prove nothing"
        moved = torch.stack([one.moved_bytes() for one in alone])
        assert torch.equal(batch.moved_bytes(), moved)
        assert bool((moved.sum((1, 2, 3)) > 0).all()) == (case.method in FETCHING)
        for one, session in zip(alone, batch.sessions, strict=True):
            assert one.session.ring is not None
            assert session.ring is not None
            expected, told = one.session.ring.collect(), session.ring.collect()
            np.testing.assert_allclose(told.mass, expected.mass, atol=1e-5)
            np.testing.assert_array_equal(told.attended, expected.attended)
            np.testing.assert_array_equal(told.moved, expected.moved)
            assert torch.equal(session.position, one.session.position)
            assert session.memory.account.resident == one.session.memory.account.resident
    finally:
        batch.close()
        for one in alone:
            one.close()


@pytest.mark.parametrize("case", [CHOSEN[4], CHOSEN[6]], ids=lambda case: case.id)
def test_a_batch_of_one_is_the_single_step_bit_for_bit(demo: Any, asked: list[Any], case: Case) -> None:
    (one,), batch = decoders(demo, asked[:1], case), BatchDecoder(decoders(demo, asked[:1], case))
    try:
        token = one.prompt.ids[-1]
        for _ in range(STEPS):
            expected = one.step(token)
            assert torch.equal(batch.step([token])[0], expected)
            token = int(expected.argmax())
        assert torch.equal(batch.moved_bytes()[0], one.moved_bytes())
    finally:
        batch.close()
        one.close()


def test_a_sequence_that_stops_first_is_fed_on_and_tells_no_more(demo: Any, asked: list[Any]) -> None:
    """One loop for all: each output ends where it ends alone, whatever the others still generate."""
    case = CHOSEN[1]
    plain = [decoder(demo, prompt, case, STEPS, read=read) for prompt, read in asked]
    ids = [one.decode(STEPS) for one in plain]
    texts = [demo.tokenizer.decode(row) for row in ids]
    begun = [(row, demo.tokenizer.decode(ids[row][:count])) for count in range(1, STEPS) for row in range(len(ids))]
    first, stop = next((row, text) for row, text in begun if not all(text in other for other in texts))
    options = Options(max_new=STEPS, ignore_eos=True, stop=(stop,))
    alone, batch = (
        [StaticDecoder(demo, prompt, *case.arguments(), options, read=read) for prompt, read in asked] for _ in range(2)
    )
    joined = BatchDecoder(batch)
    try:
        found = joined.decode(STEPS)
        assert found == [one.decode(STEPS) for one in alone]
        reasons = [generation.result.stopped for generation in joined.generations]
        assert reasons == [one.generations[0].result.stopped for one in alone]
        assert reasons[first] == "stop"
        assert len(found[first]) < STEPS
        assert "length" in reasons, "somebody has to go on"
    finally:
        joined.close()
        for one in (*plain, *alone):
            one.close()


# other drivers, on a small model


@pytest.fixture(scope="module")
def small() -> Any:
    """One layer, so that graphs are traced quickly."""
    return random_llama(num_hidden_layers=1)


def pair(model: Any, case: Case, steps: int, prompts: tuple[int, ...] = (0, 1)) -> list[StaticDecoder]:
    return [decoder(model, random_prompt(300, seed), case, steps) for seed in prompts]


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRET, reason="Triton's interpreter is off")
def test_through_the_kernels_rows_are_what_they_are_alone(small: Any) -> None:
    """k1, the slot tables and the plan in Triton's interpreter, on rows of a batch."""
    case = Case("freekv", "0.7", overrides=get("freekv").untrained)
    alone, batch = (
        [decoder(small, random_prompt(140, seed), case, 3, kernels="triton") for seed in (0, 1)] for _ in range(2)
    )
    joined = BatchDecoder(batch)
    try:
        assert joined.decode(3) == [one.decode(3) for one in alone]
        assert torch.equal(joined.moved_bytes(), torch.stack([one.moved_bytes() for one in alone]))
        assert joined.moved_bytes().sum() > 0
    finally:
        joined.close()
        for one in alone:
            one.close()


def test_all_sequences_are_one_compiled_graph(small: Any, fresh: None) -> None:
    case, backend = Case("freekv", "0.6", overrides=get("freekv").untrained), Counting()
    plain, compiled = BatchDecoder(pair(small, case, 8)), BatchDecoder(pair(small, case, 8)).compiled(backend)
    try:
        assert compiled.decode(8) == plain.decode(8)
        assert torch.equal(compiled.moved_bytes(), plain.moved_bytes())
        assert plain.moved_bytes().sum() > 0
    finally:
        plain.close()
        compiled.close()
    assert len(backend.graphs) == 1
    assert backend.calls == 7
    assert len(backend.addresses) == 1
    assert not counters["graph_break"]


def test_a_graph_cannot_be_captured_on_a_cpu(small: Any) -> None:
    batch = BatchDecoder(pair(small, Case("full", None), 4))
    try:
        batch.decode(1)
        with pytest.raises(RuntimeError, match="needs a model on a CUDA device"):
            batch.capture()
        with pytest.raises(RuntimeError, match=r"call capture\(\) first"):
            batch.replay([3, 3])
    finally:
        batch.close()


def test_a_launch_moves_positions_and_tells_no_method(small: Any) -> None:
    batch = BatchDecoder(pair(small, Case("full", None), 4))
    try:
        with torch.inference_mode():
            batch.decode(1)
            assert batch.launch().shape == (2, 512)
        assert [int(session.position) for session in batch.sessions] == [301, 301]
        assert [one.steps for one in batch.decoders] == [1, 1]
    finally:
        batch.close()


@pytest.mark.parametrize("wrong", ["none", "two models", "one has begun"])
def test_what_does_not_belong_together_is_refused(small: Any, wrong: str) -> None:
    made = pair(small, Case("full", None), 4)
    if wrong == "two models":
        made += pair(random_llama(num_hidden_layers=1), Case("full", None), 4, (0,))
    elif wrong == "one has begun":
        made[0].decode(1)
    try:
        with pytest.raises(AssertionError, match="batch"):
            BatchDecoder([] if wrong == "none" else made)
    finally:
        for one in made:
            one.close()
