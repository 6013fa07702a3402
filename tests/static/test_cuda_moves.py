"""The one piece of kvlens/lab/gpu/static/cuda.py that Triton's interpreter can run: what its fetch moves is what the
plain fetch moves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from static_support import CASES, decoder
from support import random_llama, random_prompt

from kvlens.kernels.compat import INTERPRET
from kvlens.lab.gpu.static import cuda
from kvlens.lab.gpu.static.recall import fetch


@pytest.mark.skipif(not INTERPRET, reason="Triton's interpreter is off")
@pytest.mark.parametrize("page", [1, 8])
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_the_kernel_fills_the_same_cells(page: int, token_major: bool, later: bool) -> None:
    g = torch.Generator().manual_seed(page)
    heads, cells, rows, dim = 2, 6, 20, 16
    pool = torch.randn(rows, heads, 2, page, dim, generator=g)
    unit = torch.randint(0, rows, (heads, cells), generator=g) * heads + torch.arange(heads)[:, None]
    fill = torch.rand(heads, cells, generator=g) < 0.5
    unit = torch.where(fill, unit, -1).int()
    slots = []
    for _ in range(2):
        stored = torch.full((2, cells * page, heads, dim), -1.0).transpose(1, 2)
        keys, values = stored if token_major else stored.contiguous()
        slots.append((keys.unflatten(1, (cells, page)), values.unflatten(1, (cells, page))))
    fetch(pool, unit, *slots[0], later)
    cuda.fetch(pool, unit, *slots[1], later)
    for plain, kernel in zip(*slots, strict=True):
        assert torch.equal(plain, kernel)
    assert (slots[0][0][~fill] == -1).all()
    assert (slots[0][0][fill] != -1).all()


@pytest.mark.skipif(not INTERPRET, reason="Triton's interpreter is off")
def test_a_pool_made_before_inference_mode_can_be_read_inside_it() -> None:
    """As `kvlens bench gpu` does: its host memory is pinned once, for parts that know no inference mode as well."""
    pool = torch.randn(8, 2, 2, 16, 16)
    with torch.inference_mode():
        keys, values = torch.zeros(2, 2, 3, 16, 16)
        cuda.fetch(pool, torch.tensor([[2, -1, 14], [5, 5, -1]], dtype=torch.int32), keys, values, False)
        assert torch.equal(keys[0, 2], pool[7, 0, 0])
        assert torch.equal(values[1, 0], pool[2, 1, 1])
        assert not keys[0, 1].any()


def test_only_a_stream_that_was_forked_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that waits for a stream it has not forked fails, and FullKV forks none. Streams are stood in for."""
    said: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.device = name, torch.device("cpu")

        def wait_stream(self, other: Any) -> None:
            said.append(f"{self.name} waits for {other.name}")

    main, side = Stream("main"), Stream("side")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    aside = cuda.SideStream(torch.device("cpu"))
    aside.join()
    assert said == []
    with aside.later("tensors"):
        said.append("moves")
    aside.join()
    aside.join()
    assert said == ["side waits for main", "moves", "main waits for side"]


def test_a_compiled_step_has_no_second_stream() -> None:
    made = decoder(random_llama(num_hidden_layers=1), random_prompt(40), CASES[0], 2)
    made.session.aside = cuda.SideStream.__new__(cuda.SideStream)
    assert isinstance(made.compiled("eager").session.aside, cuda.InOrder)
    made.close()
