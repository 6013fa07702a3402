"""Where the cold tier of a static step lies behind a CUDA link: in slabs of its own size, of which none is left over or left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakestreams import FakeDevice
from static_support import CASES, decoder
from support import random_llama, random_prompt
from test_compiled import on_random

from kvlens.shortage import Shortage

STEPS = 20
FETCHING = [CASES[i] for i in (5, 8, 11, 13)]


@pytest.fixture(scope="module")
def small() -> Any:
    return random_llama(num_hidden_layers=2)


def put_behind(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device behind every memory made from now on."""
    made = FakeDevice(seed=5, eager=True, lazy=True)
    monkeypatch.setattr("kvlens.memory.tiers.link_for", lambda at, ledger: made.link(ledger))
    return made


@pytest.mark.parametrize("case", FETCHING, ids=lambda case: case.id)
def test_the_rows_lie_in_pinned_memory_of_their_size(small: Any, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, case = random_prompt(400), on_random(case)
    plain = decoder(small, prompt, case, STEPS)
    expected = plain.decode(STEPS)
    plain.close()
    device = put_behind(monkeypatch)
    made = decoder(small, prompt, case, STEPS)
    rows = made.session.rows
    held = [pool for pool in (*rows.pools, *(rows.factors.flat if rows.factors is not None else ())) if pool.numel()]
    assert held
    for pool in held:
        assert any(start <= pool.data_ptr() and pool.data_ptr() + pool.nbytes <= start + size for start, size in device.pinned.items())
    most = sum(-(-pool.nbytes // 16) * 16 for pool in held) + 2 * 4096
    assert sum(device.pinned.values()) <= most, "the memory that the prompt was placed in is still locked, or slabs are larger than pools"
    assert made.decode(STEPS) == expected
    made.close()
    assert not device.pinned


def test_a_shortage_is_one_sentence_and_leaves_nothing_locked(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, case = put_behind(monkeypatch), on_random(CASES[5])
    made = decoder(small, random_prompt(400), case, STEPS)
    enough = sum(device.pinned.values())
    made.close()
    device.refused_after = enough + 4096  # for where the prompt is placed, and not for the rows beside it
    with pytest.raises(Shortage, match=r"pinned host memory could not be had: .* raise the limit on locked memory .ulimit -l."):
        decoder(small, random_prompt(400), case, STEPS)
    assert not device.pinned


def test_a_captured_step_cannot_be_replayed_once_its_memory_is_given_back(small: Any) -> None:
    made = decoder(small, random_prompt(400), on_random(CASES[5]), 4)
    made.decode(2)
    made._run, made._captured = lambda: torch.zeros(1), True  # as `capture` leaves it, which needs a GPU
    made.close()
    with pytest.raises(RuntimeError, match="nothing has been captured"):
        made.replay(3)
