"""Static decodes on a device that is not there: weights, slots, tables and counters claim CUDA (tests/fakecuda.py),
host memory is registered by a fake (tests/fakestreams.py). So the branches that only CUDA takes are run, and every step
is made under the rules of a capture: it waits for nothing, copies nothing from the host, draws nothing, its kernels
read registered memory only, and it is the same program as the step before. What kernels compute is left to their
references: other tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from fakecuda import CUDA, FakeCuda, capturing, on_cuda, on_host, registered
from fakestreams import FakeDevice
from static_support import CASES, Case, case_of, decoder
from support import random_llama, random_prompt
from test_compiled import on_random

from kvlens import methods
from kvlens.kernels import pool_attend
from kvlens.kernels.attend import attention_weights
from kvlens.kernels.slot_tables import slot_tables_torch
from kvlens.kernels.zone_torch import zone_plan_torch
from kvlens.lab.gpu.kernels import lowrank_spans, page_moves
from kvlens.lab.gpu.kernels.arrivals import arrivals_torch, fill_cells_torch
from kvlens.lab.gpu.static import BatchDecoder, StaticDecoder, batch, cuda

STEPS = 6


@pytest.fixture(scope="module")
def small() -> Any:
    return random_llama(num_hidden_layers=2, head_dim=16)


@pytest.fixture(scope="module")
def there() -> Any:
    """The same model, whose weights claim the device."""
    made = random_llama(num_hidden_layers=2, head_dim=16)
    for module in made.model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: on_cuda(tensor.data) for name, tensor in held.items() if tensor is not None})
    return made


def attends(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """k1 over the slots, in PyTorch: what kvlens.kernels.pool_attend._attend_slots is given and returns."""
    q, keys, values, table, page_len, n_page, bias, _, scaling, page, mass = (
        on_host(x) if isinstance(x, torch.Tensor) else x for x in given
    )
    heads, slots, _ = keys.shape
    if bias is None:
        bias = torch.where(torch.arange(slots) < page_len.sum(1, keepdim=True), 0.0, -torch.inf)[:, None].expand(
            -1, len(q) // heads, -1
        )
    weights = attention_weights(q, keys, bias, scaling)
    out, masses = (weights @ values).flatten(0, 1), torch.empty(0)
    if mass:
        assert page == 1
        real = torch.arange(slots) < n_page[:, None]
        masses = (
            weights.gather(2, table.long()[:, None].expand_as(weights)).masked_fill(~real[:, None], 0.0).flatten(0, 1)
        )
    return on_cuda(out), on_cuda(masses)


@contextmanager
def on_device(made: FakeDevice) -> Iterator[None]:
    with FakeCuda(), registered(made.pinned):
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice(seed=7, eager=True)
    monkeypatch.setattr("kvlens.memory.memory.link_for", lambda at, ledger: made.link(ledger))
    monkeypatch.setattr(cuda, "aside", lambda device: cuda.InOrder())
    monkeypatch.setattr(pool_attend, "_attend_slots", attends)
    monkeypatch.setattr("kvlens.lab.gpu.static.attend.slot_tables_triton", slot_tables_torch)
    monkeypatch.setattr("kvlens.lab.gpu.static.recall.zone_plan_triton", zone_plan_torch)
    monkeypatch.setattr("kvlens.lab.gpu.static.factors.arrivals_triton", arrivals_torch)
    monkeypatch.setattr("kvlens.lab.gpu.static.factors.fill_cells_triton", fill_cells_torch)
    monkeypatch.setattr(cuda, "move_triton", lambda *given, to_pool, ctas: page_moves.gather_torch(*given))
    monkeypatch.setattr(cuda, "reconstruct_triton", lowrank_spans.reconstruct_torch)
    return made


def test_the_rules_of_a_capture_are_kept(device: FakeDevice) -> None:
    with FakeCuda(), capturing():
        x, here = torch.zeros(3, device=CUDA), torch.ones(3)
        for refused in (
            lambda: x.sum().item(),
            lambda: bool(x[0] > 0),
            lambda: x.tolist(),
            lambda: x.cpu(),
            lambda: x.nonzero(),
            lambda: x[x > 0],
            lambda: x.copy_(here),
            lambda: here.to(CUDA),
            lambda: torch.tensor([1, 2], device=CUDA),
            lambda: x[[0, 1]],
            lambda: x.normal_(),
            lambda: here.copy_(x),
        ):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                refused()
        assert (x + 1 + here[0]).is_cuda
        x[1:] = 2
        assert x.copy_(x + 1)[torch.arange(2, device=CUDA)].is_cuda
        unit = torch.zeros(1, 1, dtype=torch.int32, device=CUDA)
        cells = torch.zeros(2, 1, 1, 16, 16, device=CUDA)
        pool = torch.ones(1, 1, 2, 16, 16)
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            cuda.fetch(pool, unit, *cells, False)
        with registered({pool.data_ptr(): pool.nbytes}):
            cuda.fetch(pool, unit, *cells, False)
    assert cells.sum() == 512


TRIED = [(0, 0), (1, 3), (2, 0), (3, 3), (5, 0), (7, 3), (8, 0), (9, 3), (12, 3), (13, 0), (14, 3), (15, 0)]
RUNS = [(CASES[i], ring) for i, ring in TRIED]
"""a case, and the steps that its ring holds"""
READY = [name for name, method in methods.registry().items() if method.static_ready]
RUNS += [(case_of(name), 3) for name in READY if name not in {case.method for case, _ in RUNS}]


@pytest.mark.parametrize(("case", "ring"), [pytest.param(*run, id=f"{run[0].id}-ring={run[1]}") for run in RUNS])
def test_a_step_on_the_device_can_be_captured(
    small: Any, there: Any, case: Case, ring: int, device: FakeDevice
) -> None:
    prompt, case = random_prompt(400), on_random(case)
    calls: list[list[tuple[Any, ...]]] = []
    with on_device(device):
        made: StaticDecoder = decoder(there, prompt, case, STEPS, ring=ring)
        step = made._step
        assert (made.session.kernels, made.session.recall.kernels) == ("triton", "triton")

        def captured() -> torch.Tensor:
            with capturing() as issued:
                logits = step()
            calls.append(issued)
            return logits

        made._step = made._run = captured  # type: ignore[method-assign]
        found, moved = made.decode(STEPS), made.moved_bytes()
        told = made.session.ring.collect() if ring else None
        made.close()
    assert not device.pinned
    assert len(calls[1]) > 100
    assert all(issued == calls[1] for issued in calls[2:]), (
        "what is captured at one step is another program than the next step's"
    )
    assert (calls[0] == calls[1]) == (case.method != "freekv"), "step 0 of FreeKV has nothing to speculate on"
    plain = decoder(small, prompt, case, STEPS, ring=ring)
    assert found == plain.decode(STEPS)
    assert torch.equal(moved, plain.moved_bytes())
    if told is not None:
        assert plain.session.ring is not None
        expected = plain.session.ring.collect()
        np.testing.assert_allclose(told.mass, expected.mass, atol=1e-4)
        np.testing.assert_array_equal(told.attended, expected.attended)
        np.testing.assert_array_equal(told.moved, expected.moved)
    plain.close()


@pytest.mark.parametrize("case", [CASES[2], CASES[5]], ids=lambda case: case.id)
def test_a_step_of_several_sequences_can_be_captured(
    small: Any, there: Any, case: Case, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "lanes", lambda device, rows: batch.OneLane())
    prompts, case = [random_prompt(400), random_prompt(300, seed=1)], on_random(case)
    calls: list[list[tuple[Any, ...]]] = []
    with on_device(device):
        made = BatchDecoder([decoder(there, prompt, case, STEPS) for prompt in prompts])
        step = made._step

        def captured() -> torch.Tensor:
            with capturing() as issued:
                logits = step()
            calls.append(issued)
            return logits

        made._step = made._run = captured  # type: ignore[method-assign]
        found = made.decode(STEPS)
        made.close()
    assert not device.pinned
    assert all(issued == calls[1] for issued in calls[2:])
    plain = BatchDecoder([decoder(small, prompt, case, STEPS) for prompt in prompts])
    assert found == plain.decode(STEPS)
    plain.close()
