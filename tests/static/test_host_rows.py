"""Where the cold tier of a static step lies behind a CUDA link: in slabs of its own size, of which none is left over or
left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakestreams import FakeDevice
from static_support import CASES, decoder
from support import random_llama, random_prompt
from test_compiled import on_random

from kvlens.link import cuda_link
from kvlens.link.codec import Cut
from kvlens.shortage import Shortage

STEPS = 20
FETCHING = [CASES[i] for i in (5, 8, 11, 13)]


@pytest.fixture(scope="module")
def small() -> Any:
    return random_llama(num_hidden_layers=2)


def put_behind(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device behind every memory made from now on."""
    made = FakeDevice(seed=5, eager=True, lazy=True)
    monkeypatch.setattr("kvlens.memory.memory.link_for", lambda at, ledger: made.link(ledger))
    return made


@pytest.mark.parametrize("case", FETCHING, ids=lambda case: case.id)
def test_the_rows_lie_in_pinned_memory_of_their_size(small: Any, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, case = random_prompt(400), on_random(case)
    plain = decoder(small, prompt, case, STEPS)
    expected = plain.decode(STEPS)
    plain.close()
    device = put_behind(monkeypatch)
    made = decoder(small, prompt, case, STEPS)
    cold = made.session.memory.host.cold
    held = [*cold.pools, *cold.flat]
    assert held
    for pool in held:
        assert any(
            start <= pool.data_ptr() and pool.data_ptr() + pool.nbytes <= start + size
            for start, size in device.pinned.items()
        )
    most = sum(-(-pool.nbytes // 16) * 16 for pool in held) + 2 * 4096
    assert sum(device.pinned.values()) <= most, "slabs are larger than pools"
    assert made.decode(STEPS) == expected
    made.close()
    assert not device.pinned


@pytest.mark.parametrize("case", [CASES[5], CASES[8], CASES[11]], ids=lambda case: case.id)
def test_what_leaves_the_window_is_one_copy_per_layer(small: Any, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pages, and of spans of any length in rows of one token, whose units are strided: the KV heads of a layer are
    one stretch."""
    device, case = put_behind(monkeypatch), on_random(case)
    made = decoder(small, random_prompt(400), case, STEPS)
    memory, issued, found = made.session.memory, list[int](), list[tuple[int, ...]]()
    leave, copy = memory.leave_window, cuda_link._copy

    def counted(pieces: Any) -> None:
        issued.extend(target.nbytes for target, _ in pieces)
        copy(pieces)

    def leaves(*given: Any) -> None:
        issued.clear()
        before = len(memory.transfers.opened)
        leave(*given)
        device.finish()
        entries = memory.transfers.opened[before:]
        lines = sum(len(entry.sizes) for entry in entries)
        found.append((len(issued), len(entries), lines, sum(issued) - sum(entry.bytes for entry in entries)))

    monkeypatch.setattr(cuda_link, "_copy", counted)
    monkeypatch.setattr(memory, "leave_window", leaves)
    made.decode(STEPS)
    made.close()
    shape = memory.shape
    assert set(found) == {(shape.layers, 1, shape.layers * shape.kv_heads, 0)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_every_bit_goes_into_its_rows_and_into_no_other(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of 1 to 32 tokens, not numbers among what they hold, in the pool of a decode."""
    model = random_llama(dtype=dtype, num_hidden_layers=2)
    device = put_behind(monkeypatch)
    made = decoder(model, random_prompt(400), on_random(CASES[8]), STEPS)
    memory, cold, shape = made.session.memory, made.session.memory.host.cold, made.session.memory.shape
    span = next(row for row in memory.spans.rows if row.state == "cold")
    first, g = span.tok_start - cold.origin, torch.Generator().manual_seed(3)

    def noise(*size: int) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, size, generator=g).to(torch.int16).view(dtype)

    for tokens in range(1, 33):
        pool = cold.layer(1)
        pool.copy_(noise(*pool.shape))
        expected = pool.view(torch.int16).clone()
        keys, values = noise(2, shape.layers, shape.kv_heads, tokens, shape.head_dim)
        expected[first : first + tokens, :, 0, 0] = keys[1].transpose(0, 1).view(torch.int16)
        expected[first : first + tokens, :, 1, 0] = values[1].transpose(0, 1).view(torch.int16)
        cut = Cut(span.span, span.tok_start, span.tok_start + tokens)
        moves, stored = cold.put([cut], None, keys, values, span.tok_start)
        entry = memory.transfers.open(0, 0, span.span, "d2h", "leave", stored.size.ravel(), blocking=True)
        memory.host.link.submit(entry, moves).wait()
        device.finish()
        assert torch.equal(pool.view(torch.int16), expected)
    whole = cold.unit(1, span.span, 0).view(torch.int16)
    here = slice(first, first + span.tok_end - span.tok_start)
    assert torch.equal(whole, cold.layer(1)[here, 0, :, 0].transpose(0, 1).view(torch.int16))
    made.close()


def test_a_shortage_is_one_sentence_and_leaves_nothing_locked(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, case = put_behind(monkeypatch), on_random(CASES[5])
    made = decoder(small, random_prompt(400), case, STEPS)
    enough = sum(device.pinned.values())
    made.close()
    device.refused_after = enough - 1
    with pytest.raises(
        Shortage, match=r"pinned host memory could not be had: .* raise the limit on locked memory .ulimit -l."
    ):
        decoder(small, random_prompt(400), case, STEPS)
    assert not device.pinned


def test_a_captured_step_cannot_be_replayed_once_its_memory_is_given_back(small: Any) -> None:
    made = decoder(small, random_prompt(400), on_random(CASES[5]), 4)
    made.decode(2)
    made._run, made._captured = lambda: torch.zeros(1), True  # as `capture` leaves it, which needs a GPU
    made.close()
    with pytest.raises(RuntimeError, match="nothing has been captured"):
        made.replay(3)
