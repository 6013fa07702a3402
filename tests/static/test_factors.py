"""Factors reconstructed inside a static step: what the kernel makes of them in Triton's interpreter is what PyTorch
makes of them, and both are what the engine's codec unpacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from static_support import Case, decoder
from support import random_llama, random_prompt
from test_compiled import on_random

from kvlens.kernels.compat import INTERPRET
from kvlens.lab.gpu.kernels.arrivals import arrivals
from kvlens.link.codec import Units
from kvlens.tiers.slots import ROLE


@pytest.fixture(scope="module")
def made() -> Any:
    case = on_random(Case("sekv", "0.6", overrides={"form": "factors"}))
    made = decoder(random_llama(num_hidden_layers=2), random_prompt(400), case, 4)
    yield made
    made.close()


def listed(factors: Any) -> torch.Tensor:
    """Spans that lie as factors, as one KV head's first places list them; nothing comes for the last place, nor for
    another head."""
    heads, spans = factors.tokens_of(1).shape
    came = torch.zeros(heads, spans, dtype=torch.bool)
    came[0, factors.tokens_of(1)[0].nonzero()[: factors._most - 1, 0]] = True
    came[1:-1] = came[0]
    assert came[0].sum() > 2
    return arrivals(came, factors.meta[1], factors._most, factors.head_dim, 4).tiles


def test_spans_are_what_the_codec_unpacks(made: Any) -> None:
    factors, memory = made.session.recall.factors, made.session.memory
    tiles = listed(factors)
    keys, values = factors._rebuild(1, 1, tiles)
    for number, _, place in tiles[tiles[:, 0] >= 0].tolist():
        head, span = divmod(number, factors.meta.shape[2])
        numbers, table = memory.host.cold.unit(1, span, head), memory.host.cold.table[1, head, span].clone()
        table[0], tokens = 0, int(table[1])
        start = torch.tensor([memory.spans.rows[span].tok_start])
        exact = memory.host.cold.codec.unpack(
            numbers, Units(table[None], start, 1, tokens, factors.head_dim, torch.zeros(1))
        )
        for found, expected in zip((keys, values), exact, strict=True):
            torch.testing.assert_close(found[head, place, :tokens], expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not INTERPRET, reason="Triton's interpreter is off")
def test_the_kernel_makes_the_same_of_them(made: Any) -> None:
    factors = made.session.recall.factors
    tiles = listed(factors)
    plain = factors._rebuild(1, 1, tiles)
    factors.use("triton")
    kernel = factors._rebuild(1, 1, tiles)
    factors.use("torch")
    number = tiles[:, 0].view(factors.meta.shape[1], -1)
    tokens = factors.meta[1].view(-1, 4)[number.clamp(min=0), 1].masked_fill(number < 0, 0)
    live = torch.arange(factors.tokens) < tokens[..., None]
    assert live.any()
    for found, expected in zip(kernel, plain, strict=True):
        torch.testing.assert_close(found[live], expected[live], atol=1e-5, rtol=1e-5)


def test_only_what_is_fetched_is_renamed_and_counted(made: Any) -> None:
    """Masses, tokens and bytes against the engine: test_static_step.py. Here: a slot that says it was reconstructed
    holds such a span."""
    made.decode(4)
    factors, memory = made.session.recall.factors, made.session.memory
    slots = memory.hot.slots(1)
    rebuilt = slots.role == ROLE["reconstructed"]
    assert rebuilt.any()
    assert (factors.tokens_of(memory.host.cold.place[1]).gather(1, slots.span.long())[rebuilt] > 0).all()
    assert int(made.moved_bytes().sum()) > 0


def test_what_a_factored_step_keeps_is_counted(made: Any) -> None:
    factors = made.session.recall.factors
    assert made.session.bytes >= made.session.recall.bytes >= factors.bytes >= factors.meta.nbytes
