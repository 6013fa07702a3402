"""k1 over the slots of a static step, in Triton's interpreter: output and masses are those of PyTorch's attention with
the same bias, and whole decodes through it generate the same tokens and tell the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from static_support import CASES, Counting, decoder, small_model
from support import random_llama, random_prompt
from test_compiled import on_random

from kvlens.kernels.attend import attention_weights, decode_attention
from kvlens.kernels.compat import INTERPRET
from kvlens.kernels.pool_attend import attend_slots, live_pages, live_prefix

pytestmark = pytest.mark.skipif(not INTERPRET, reason="Triton's interpreter is off")
HEADS, GROUP, DIM = 2, 3, 16


def pool(slots: int, token_major: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, keys, values; a pool may lie token-major."""
    g = torch.Generator().manual_seed(seed)
    stored = torch.randn(2, slots, HEADS, DIM, generator=g).transpose(1, 2)
    keys, values = stored if token_major else stored.contiguous()
    return torch.randn(HEADS * GROUP, DIM, generator=g), keys, values


@pytest.mark.parametrize("page", [1, 16, 32])
@pytest.mark.parametrize("slots", [32, 77, 160])
@pytest.mark.parametrize("token_major", [False, True])
def test_pages_of_the_pool_with_a_bias(page: int, slots: int, token_major: bool) -> None:
    q, keys, values = pool(slots, token_major, slots)
    g = torch.Generator().manual_seed(page)
    bias = torch.where(
        torch.rand(HEADS, GROUP, slots, generator=g) < 0.5, -torch.inf, torch.randn(HEADS, GROUP, slots, generator=g)
    )
    bias[:, :, slots // 3 : slots // 2] = -torch.inf
    bias[:, :, -1] = 0.5
    expected = decode_attention(q[None, :, None], keys, values, bias, 0.25)[0, :, 0]
    weights = attention_weights(q, keys, bias, 0.25)
    dead = (bias == -torch.inf).all(1)
    keys, values = (x.masked_fill(dead[..., None], 1e30) for x in (keys, values))
    live = live_pages(bias, page)
    wide = torch.nn.functional.pad(~dead, (0, live.table.shape[1] * page - slots)).unflatten(1, (-1, page)).any(2)
    assert live.n_page.tolist() == wide.sum(1).tolist()
    out, mass = attend_slots(q, keys, values, live, 0.25, page, True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mass.sum(-1), torch.ones(HEADS * GROUP), atol=1e-5, rtol=0)
    if page == 1:
        found = torch.zeros(HEADS, GROUP, slots).scatter_add(
            2, live.table.long()[:, None].expand(-1, GROUP, -1), mass.view(HEADS, GROUP, -1)
        )
        torch.testing.assert_close(found, weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [1, 31, 32, 50])
def test_a_live_prefix_without_a_bias(count: int) -> None:
    q, keys, values = pool(50, token_major=True)
    expected = decode_attention(q[None, :, None], keys[:, :count], values[:, :count], None, 0.25)[0, :, 0]
    keys, values = (x.index_fill(1, torch.arange(count, 50), torch.nan) for x in (keys, values))
    live = live_prefix(torch.tensor(count), HEADS, 50, 32)
    out, mass = attend_slots(q, keys, values, live, 0.25, 32, False)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert mass.numel() == 0


STEPS = 4
KINDS = [CASES[i] for i in (0, 1, 2, 5, 8, 13)]


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.id)
def test_a_decode_through_k1_is_the_decode_through_pytorch(case: Any) -> None:
    prompt, case = random_prompt(400 if case.method == "sekv" else 140), on_random(case)
    plain = decoder(small_model(case), prompt, case, STEPS, ring=3, record="spans")
    through = decoder(small_model(case), prompt, case, STEPS, ring=3, record="spans", kernels="triton")
    assert (plain.session.kernels, through.session.kernels) == ("torch", "triton")
    try:
        assert plain.decode(STEPS) == through.decode(STEPS)
        assert plain.session.ring is not None
        assert through.session.ring is not None
        expected, found = plain.session.ring.collect(), through.session.ring.collect()
    finally:
        plain.close()
        through.close()
    np.testing.assert_allclose(found.mass, expected.mass, atol=1e-5)
    np.testing.assert_array_equal(found.attended, expected.attended)
    np.testing.assert_array_equal(found.moved, expected.moved)
    np.testing.assert_allclose(found.spans, expected.spans, atol=1e-3)
    np.testing.assert_allclose(found.spans.astype(float).sum(-1), 1.0, atol=1e-2)


@pytest.mark.parametrize("case", [CASES[2], CASES[5]], ids=lambda case: case.id)
def test_without_a_ring_pages_are_larger_and_tokens_the_same(case: Any) -> None:
    prompt, case = random_prompt(140), on_random(case)
    plain, through = (
        decoder(small_model(case), prompt, case, STEPS),
        decoder(small_model(case), prompt, case, STEPS, kernels="triton"),
    )
    try:
        assert through.session.slots.page > 1
        assert plain.decode(STEPS) == through.decode(STEPS)
    finally:
        plain.close()
        through.close()


@pytest.mark.slow
def test_one_graph_with_k1_in_it() -> None:
    torch._dynamo.reset()
    prompt, case, backend = random_prompt(140), on_random(CASES[5]), Counting()
    plain, compiled = (decoder(small_model(case), prompt, case, STEPS, ring=4, kernels="triton") for _ in range(2))
    try:
        assert compiled.compiled(backend).decode(STEPS) == plain.decode(STEPS)
    finally:
        plain.close()
        compiled.close()
    assert len(backend.graphs) == 1
    called = " ".join(str(node.target) for node in backend.graphs[0].graph.nodes)
    assert "attend_slots" in called
    assert "slot_tables" in called
    assert "zone_plan" in called


@pytest.mark.parametrize(("width", "by"), [(8, "torch"), (12, "torch"), (16, "triton")])
def test_a_width_that_k1_does_not_take_is_pytorchs(width: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlens.lab.gpu.static.session.backend", lambda tensor: "triton")
    model = random_llama(num_hidden_layers=1, head_dim=width)
    made = decoder(model, random_prompt(40), CASES[0], 2)
    assert made.session.kernels == by
    made.close()
