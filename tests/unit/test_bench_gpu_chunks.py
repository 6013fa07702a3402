"""SentKVCompress's attention path of `kvlens bench gpu`: what its zone plan brings is what is wished for, and exactly so much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvlens.bench.gpu import paths
from kvlens.bench.gpu.device import DryDevice
from kvlens.bench.gpu.floors import CHUNK, Rates, step_shape
from kvlens.bench.gpu.part import Bench
from kvlens.bench.gpu.paths import Chunks
from kvlens.kernels.compat import INTERPRET
from kvlens.kernels.zone_plan import zone_plan_triton
from kvlens.kernels.zone_torch import zone_plan_torch

CONTEXT, BATCH = 1024, 2
PLANNERS = [zone_plan_torch, pytest.param(zone_plan_triton, marks=pytest.mark.skipif(not INTERPRET, reason="the interpreter is off"))]


@pytest.mark.parametrize("planner", PLANNERS)
def test_chunks_wished_for_lie_in_their_slots(planner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences, whose chunks alternate in the pool; past the turn of the replay's pattern."""
    moved = []

    def planned(*given: Any) -> Any:
        moves = planner(*given)
        moved.append(moves.bytes)
        return moves

    monkeypatch.setattr(paths, "zone_plan", planned)
    bench = Bench(DryDevice(), (CONTEXT,), (BATCH,), {"entries": {}})
    bench.pool.copy_(torch.randn(bench.pool.shape))
    shape = step_shape("sentkv", CONTEXT, Rates(reuse=0.5))
    path = Chunks(bench, shape, CONTEXT, BATCH)
    kv, layer = bench.model.kv, 1
    q = torch.randn(BATCH, kv.q_heads, kv.head_dim).bfloat16()
    steps = path.counter.steps + 2
    for _ in range(steps):
        path.begin()
        path.attend(layer, q)
        want = path.want - 1
        path.end()
        keys, values = path.layers[layer]
        for row, chunks in enumerate(want.tolist()):
            sequence, head = divmod(row, kv.kv_heads)
            own = slice(sequence * shape.held, (sequence + 1) * shape.held)
            for cells, which in ((keys, 0), (values, 1)):
                expected = {path.pools[layer][chunk * BATCH + sequence, head, which].float().sum().item() for chunk in chunks}
                assert {cell.float().sum().item() for cell in cells[own, head]} == expected
    assert len(moved) == steps
    assert (moved[0] == shape.wanted * CHUNK * kv.head_token_bytes).all()
    assert all((each == shape.missed * CHUNK * kv.head_token_bytes).all() for each in moved[1:])
