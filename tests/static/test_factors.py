"""Factors reconstructed inside a static step: what the kernel makes of them in Triton's interpreter is what PyTorch makes of them, and
both are what the engine's codec unpacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from static_support import Case, decoder
from support import random_llama, random_prompt
from test_compiled import on_random

from kvlens.kernels.compat import INTERPRET
from kvlens.memory import ROLE


@pytest.fixture(scope="module")
def made() -> Any:
    case = on_random(Case("sekv", "0.6", overrides={"form": "factors"}))
    made = decoder(random_llama(num_hidden_layers=2), random_prompt(400), case, 4)
    yield made
    made.close()


def arrived(factors: Any) -> torch.Tensor:
    """All spans that lie as factors, [H, A], with a hole in front."""
    ids = factors.tokens_of(1)[0].nonzero()[: factors._most - 1, 0]
    assert len(ids) > 2
    return torch.cat((torch.tensor([-1]), ids)).expand(factors.meta.shape[1], -1)


def test_spans_are_what_the_codec_unpacks(made: Any) -> None:
    factors, memory = made.session.rows.factors, made.session.memory
    wanted = arrived(factors)
    keys, values = factors._rebuild(1, 1, wanted)
    for place, span in enumerate(wanted[0].tolist()):
        for head in range(memory.shape.kv_heads if span > 0 else 0):
            unit = memory.cold.get(1, span, head)
            exact = memory.recaller.codec.unpack(unit, unit.payload)
            for found, expected in zip((keys, values), exact, strict=True):
                torch.testing.assert_close(found[head, place, : unit.tokens], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not INTERPRET, reason="Triton's interpreter is off")
def test_the_kernel_makes_the_same_of_them(made: Any) -> None:
    factors = made.session.rows.factors
    wanted = arrived(factors)
    plain = factors._rebuild(1, 1, wanted)
    factors.reserve()
    kernel = factors._by_kernel(1, wanted)
    tokens = factors.meta[1].gather(1, wanted.clamp(min=0)[..., None].expand(-1, -1, 4))[..., 1].masked_fill(wanted < 0, 0)
    live = torch.arange(factors.tokens) < tokens[..., None]
    for found, expected in zip(kernel, plain, strict=True):
        torch.testing.assert_close(found[live], expected[live], atol=1e-5, rtol=1e-5)


def test_only_what_is_fetched_is_renamed_and_counted(made: Any) -> None:
    """Masses, tokens and bytes against the engine: test_static_step.py. Here: a slot that says it was reconstructed holds such a span."""
    made.decode(4)
    rows, memory = made.session.rows, made.session.memory
    slots = memory.hot.slots(1)
    rebuilt = slots.role == ROLE["reconstructed"]
    assert rebuilt.any()
    assert (rows.factors.tokens_of(rows.at(1)).gather(1, slots.span.long())[rebuilt] > 0).all()
    assert int(made.moved_bytes().sum()) > 0


def test_what_a_factored_step_keeps_is_counted(made: Any) -> None:
    factors = made.session.rows.factors
    assert made.session.bytes >= made.session.recall.bytes >= factors.bytes >= factors.meta.nbytes
