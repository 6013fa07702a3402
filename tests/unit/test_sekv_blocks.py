"""What becomes of decoded tokens that leave SeKV's window, by preset (docs/evidence/sekv.md, 'Decoded tokens')."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlens.methods.sekv.codec import Parts
from kvlens.methods.sekv.layout import block_anchor_cap
from kvlens.methods.sekv.params import PRESETS, SeKVParameters
from kvlens.methods.sekv.spans import segment
from kvlens.shape import KVShape
from kvlens.spans import Surprisal

START = 500
SHAPE = KVShape(layers=30, q_heads=9, kv_heads=3, head_dim=64, itemsize=4)
FIT = SeKVParameters.fit(SHAPE, 1024, 64, SHAPE.full_kv_bytes(1088) // 5)


def block(params: SeKVParameters, seed: int) -> list[tuple[str, int]]:
    """Kind and length of each span of a block of decoded tokens; a few of them surprise."""
    nats = np.random.default_rng(seed).exponential(2.0, params.block)
    spans = segment(params, nats, START, Surprisal(1.0, 1.0), block_anchor_cap(params))
    assert spans[0].tok_start == START
    assert spans[-1].tok_end == START + params.block
    return [(span.kind, len(span)) for span in spans]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["fit", "demo", "bound"])
def test_a_block_shorter_than_l_max_has_no_anchors(name: str, seed: int) -> None:
    params = SeKVParameters(**(FIT if name == "fit" else PRESETS[name]))
    assert params.l_min <= params.block < params.l_max
    spans = block(params, seed)
    assert {kind for kind, _ in spans} == {"entropy"}
    assert min(length for _, length in spans) >= params.l_min


@pytest.mark.parametrize("seed", range(5))
def test_a_block_shorter_than_l_min_stays_as_it_is(seed: int) -> None:
    params = SeKVParameters(**PRESETS["no-coarse"])
    assert params.block < params.l_min
    assert block(params, seed) == [("short", params.block)]


def test_the_rank_is_the_number_of_components_that_are_stored() -> None:
    gates = torch.tensor([[0.01, 0.5, 0.9], [0.01, 0.02, 0.03], [0.9, 0.01, 0.5]])
    parts = Parts(torch.zeros(3, 4, 3), torch.ones(3, 3), gates, torch.zeros(3, 3, 4), torch.ones(3))
    assert parts.rank(0.05).tolist() == [3, 1, 2] == parts.choose_kept(0.05).sum(-1).tolist()
