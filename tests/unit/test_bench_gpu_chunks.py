"""Attention paths of `kvlens bench gpu` that plan a zone: what the plan brings is what is wished for, and exactly so
much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvlens.gpu.bench import paths
from kvlens.gpu.bench.device import DryDevice
from kvlens.gpu.bench.floors import Rates, step_shape
from kvlens.gpu.bench.part import Bench
from kvlens.gpu.bench.paths import Chunks, Zoned
from kvlens.gpu.bench.paths_other import SeKV
from kvlens.kernels.compat import INTERPRET
from kvlens.kernels.zone_plan import zone_plan_triton
from kvlens.kernels.zone_torch import zone_plan_torch

CONTEXT, BATCH = 1024, 2
PLANNERS = [
    zone_plan_torch,
    pytest.param(zone_plan_triton, marks=pytest.mark.skipif(not INTERPRET, reason="the interpreter is off")),
]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    ("method", "make", "rates"), [("sentkv", Chunks, Rates(reuse=0.5)), ("sekv", SeKV, Rates(zoom=0.4, miss=0.8))]
)
def test_what_is_wished_for_lies_in_its_slots(
    method: str, make: type[Zoned], rates: Rates, planner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences, whose chunks (spans) alternate in the pool; past the turn of the replay's pattern."""
    moved = []

    def planned(*given: Any) -> Any:
        moves = planner(*given)
        moved.append(moves.bytes)
        return moves

    monkeypatch.setattr(paths, "zone_plan", planned)
    bench = Bench(DryDevice(), (CONTEXT,), (BATCH,), {"entries": {}})
    bench.pool.copy_(torch.randn(bench.pool.shape))
    shape = step_shape(method, CONTEXT, rates)
    path = make(bench, shape, CONTEXT, BATCH)
    kv, layer = bench.model.kv, 1
    q = torch.randn(BATCH, kv.q_heads, kv.head_dim).bfloat16()
    steps = path.counter.steps + 2
    for _ in range(steps):
        path.begin()
        path.attend(layer, q)
        want = path.want - 1
        path.end()
        keys, values = path.layers[layer]
        slots = len(keys) // BATCH
        for row, chunks in enumerate(want.tolist()):
            sequence, head = divmod(row, kv.kv_heads)
            own = slice(sequence * slots, (sequence + 1) * slots)
            for cells, which in ((keys, 0), (values, 1)):
                expected = {
                    path.pools[layer][chunk * BATCH + sequence, head, which].float().sum().item() for chunk in chunks
                }
                assert {cell.float().sum().item() for cell in cells[own, head]} == expected
    assert len(moved) == steps
    assert (moved[0] == shape.wanted * shape.page * kv.head_token_bytes).all()
    assert all((each == shape.missed * shape.page * kv.head_token_bytes).all() for each in moved[1:])
