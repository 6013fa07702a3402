"""Floors and headlines of `kvlens bench gpu`: arithmetic, against figures computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvlens.lab.gpu.floors import LLAMA_8B, Traffic, traffic
from kvlens.lab.gpu.headlines import at_papers, compare, list_measurable
from kvlens.lab.gpu.settings import Headline, everything, settings
from kvlens.lab.results.gpu import HeadlineRow

KNOWN = everything()


def moved(name: str, context: int, batch: int = 1, **rates: float) -> Traffic:
    setting = KNOWN[name]
    assert setting.shape is not None
    return traffic(setting.shape(LLAMA_8B.kv, context, {**setting.rates, **rates}), LLAMA_8B, batch)


def test_weights_of_an_8b_step() -> None:
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    assert LLAMA_8B.weight_bytes == 2 * (32 * layer + 4096 * 128256) == 15_009_316_864


def test_full_kv_at_32k_is_429_gb() -> None:
    assert moved("full", 32768).kv == 32 * 8 * 32768 * 2 * 128 * 2 == 4_294_967_296
    assert moved("full", 131072, 8).resident == 137_438_953_472
    assert moved("full", 32768).host_bytes == 0


def test_freekv_moves_its_misses_and_reads_its_budget() -> None:
    found = moved("freekv", 32768, miss=0.5, correction=0.25)
    unit = 32 * 2 * 128 * 2
    assert found.kv == 32 * 8 * 64 * unit == 268_435_456
    assert found.summaries == 32 * 8 * 1024 * 2 * 128 * 2 == 134_217_728
    assert found.host_bytes == 32 * 8 * 16 * unit
    assert found.blocking == found.host_bytes // 4
    assert moved("blocking", 32768, miss=0.5).blocking == found.host_bytes


def test_what_is_waited_for_adds_and_the_rest_hides() -> None:
    found = moved("freekv", 32768, miss=0.5, correction=0.25)
    assert found.floor(1e12, 1e12) == pytest.approx((found.device_bytes + found.blocking) / 1e12)
    assert found.floor(1e12, 1e6) == pytest.approx(found.host_bytes / 1e6)


def test_a_full_cache_over_the_bus_is_bound_by_the_bus() -> None:
    found = moved("hf_offloaded", 32768)
    assert found.floor(3e12, 52e9) == pytest.approx(4_294_967_296 / 52e9)
    assert found.resident == 2 * 4_294_967_296 // 32


def test_factors_come_over_the_bus_and_lie_as_tokens() -> None:
    found = moved("sekv", 32768)
    assert found.summaries == 32 * 32 * 512 * 32 * 2
    assert found.host_bytes == 32 * 8 * 8 * (2 * 16 * (64 + 128 + 1)) * 2, "8 of 26 spans as factors of rank 16"
    assert found.arrivals == 32 * 8 * 8 * 64 * 512, "and as tokens when they have come"


@pytest.mark.parametrize("context", [256, 8192, 131072])
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_no_method_attends_or_holds_more_than_there_is(name: str, context: int) -> None:
    setting = KNOWN[name]
    assert setting.shape is not None
    shape = setting.shape(LLAMA_8B.kv, context, setting.rates)
    assert shape.attended <= context + 32
    assert shape.held <= context + 32
    assert shape.missed <= max(shape.wanted, context // 32)


# headlines


def step_row(method: str, context: int, batch: int, median: float, peak: int, scope: str = "decode") -> dict[str, Any]:
    row = {"method": method, "context": context, "batch": batch, "median": median, "peak_bytes": peak, "scope": scope}
    return row | {"rates": KNOWN[method].rates}


def at_rates(headline: Headline, steps: list[dict[str, Any]]) -> HeadlineRow:
    return compare(headline, LLAMA_8B, steps, 3e12, 52e9, at_papers, "papers")


def test_headlines_say_ours_and_what_bytes_allow() -> None:
    by_name = {headline.name: headline for headline in list_measurable()}
    steps = [
        step_row("full", 32768, 8, 9.0, 1),
        step_row("full", 32768, 1, 0.012, 1),
        step_row("chess", 32768, 1, 0.006, 1),
    ]
    found = at_rates(by_name["CHESS against FullKV at 32K"], steps)
    assert found.ours == pytest.approx(2.0)
    assert found.floor == pytest.approx(1.28, abs=0.005)
    assert not found.reachable
    compiled = at_rates(
        by_name["CHESS against FullKV at 32K"], [*steps, step_row("chess", 32768, 1, 0.004, 1, "compiled")]
    )
    assert compiled.ours == pytest.approx(3.0), "the fastest way to make a whole step"
    memory = by_name["SeKV memory at 128K"]
    steps = [step_row("full", 131072, 1, 1.0, 40), step_row("sekv", 131072, 1, 1.0, 30)]
    assert at_rates(memory, steps).ours == pytest.approx(0.25)
    assert at_rates(memory, []).ours is None


@pytest.mark.parametrize("name", [name for name, setting in settings().items() if setting.rates])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("context", [256, 8192, 131072])
def test_any_rate_can_be_replayed(name: str, share: float, context: int) -> None:
    make = KNOWN[name].shape
    assert make is not None
    shape = make(
        LLAMA_8B.kv, context, {rate: min(share, 0.9) if rate == "zoom" else share for rate in KNOWN[name].rates}
    )
    units = context // {"sentkv": 16, "sekv": 64}.get(name, 32)
    assert 1 <= shape.missed <= shape.wanted
    assert shape.wanted + shape.missed <= units or (shape.missed, shape.wanted) == (1, units)


def test_zooms_beyond_128_spans_are_not_cut() -> None:
    make = KNOWN["sekv"].shape
    assert make is not None
    assert make(LLAMA_8B.kv, 131072, {"miss": 0.3, "zoom": 0.2}).wanted == math.ceil(0.2 * 2048)
