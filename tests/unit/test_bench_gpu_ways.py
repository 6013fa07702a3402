"""The ways of a whole step, and the tiles of its products."""

from __future__ import annotations

from typing import Any

import pytest

from kvlens.lab.gpu import decode_parts, decoding, matvec_times
from kvlens.lab.gpu.device import DryDevice
from kvlens.lab.gpu.kernels import matvec
from kvlens.lab.gpu.kernels.matvec import Tile, best_tile
from kvlens.lab.gpu.part import Bench
from kvlens.lab.results.gpu import CheckRow, KernelRow, StepRow


def bench(*rows: dict[str, Any]) -> Bench:
    return Bench(DryDevice(), (512,), (1, 2), {"entries": {"any": {"rows": list(rows)}}})


def test_the_fastest_tile_of_an_earlier_call_is_adopted() -> None:
    settings = {"p; 64 x 32 x 1 x 0; 4 x 16 x 2 x 1": 3e-6, "p; 64 x 32 x 1 x 0; 8 x 32 x 4 x 1": 2e-6}
    settings |= {"p; 64 x 32 x 8 x 1; 32 x 64 x 4 x 3": 1e-6}
    rows = [
        {"kind": "kernel", "kernel": matvec_times.KERNEL, "setting": setting, "seconds": seconds}
        for setting, seconds in settings.items()
    ]
    try:
        matvec_times.adopt({"entries": {"matvecs": {"rows": rows}}})
        assert best_tile(64, 32, 1, False) == Tile(8, 32, 4)
        assert best_tile(64, 32, 8, True) == Tile(32, 64, 4, 3)
        assert best_tile(64, 32, 1, True) == matvec.ONE[0]
    finally:
        for key in ((64, 32, False, False), (64, 32, True, True)):
            matvec.MEASURED.pop(key, None)


def test_every_tile_is_measured_and_the_library_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matvec_times, "MEASURED", {})
    rows = list(matvec_times.measure(bench()))
    assert all(isinstance(row, KernelRow) and row.seconds for row in rows)
    assert len(rows) == 2 * len(matvec_times.products(bench())) * 3, "a dry run tries two tiles"
    assert sum(row.kernel == matvec_times.LIBRARY_ALONE for row in rows) == len(rows) // 3
    assert len(matvec_times.MEASURED) == len(rows) // 3


def test_blocking_recall_is_measured_as_the_host_leads_it() -> None:
    rows = list(decode_parts.led_by_host(512).run(bench()))
    assert [(row.batch, row.way, row.graph, row.reason) for row in rows if isinstance(row, StepRow)] == [
        (batch, decoding.HOST_LED, False, None) for batch in (1, 2)
    ]
    assert all(isinstance(row, StepRow) and row.counted_bytes == row.host_bytes for row in rows)


def test_all_ways_move_the_same_bytes() -> None:
    rows = [row for row in decode_parts.ways(512).run(bench()) if isinstance(row, StepRow)]
    assert {row.way for row in rows} == set(decode_parts.WAYS)
    for name in ("full", "freekv"):
        assert len({row.counted_bytes for row in rows if row.method == name}) == 1


def test_checks_of_the_step_pass_on_a_cpu() -> None:
    from kvlens.lab.gpu import step_checks

    rows = list(step_checks.measure(bench()))
    assert rows
    assert all(isinstance(row, CheckRow) and row.passed for row in rows)
