"""The phases of a step add up to its duration, and timing them changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from support import ListSink, random_prompt, run

from kvlens.memory import clock
from kvlens.memory.clock import PHASES, REST, NoClock, PhaseClock


def test_time_belongs_to_the_phase_that_was_entered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 5_000, 9_000, 10_000, 12_000, 20_000])
    monkeypatch.setattr(clock.time, "perf_counter_ns", lambda: next(ticks))
    phases = PhaseClock()
    assert phases.enter("score") == REST
    assert phases.enter("attend") == "score"
    assert phases.enter("score") == "attend"
    assert phases.enter(REST) == "score"
    spent = phases.take(30_000)
    assert {name: took for name, took in spent.items() if took} == {"score": 6, "attend": 1, REST: 23}


def test_no_clock_gives_the_phase_back_and_no_times() -> None:
    assert (NoClock().enter("score"), NoClock().take(5)) == ("score", None)


@pytest.mark.parametrize("method", ["freekv page=8 tokens=96 sinks=8 window=16", "quest page=8 tokens=64"])
def test_every_recorded_step_has_all_phases_and_they_add_up(tiny: Any, method: str) -> None:
    prompt, timed, untimed = random_prompt(300, seed=3), ListSink(), ListSink()
    settings = {"budget": "100%" if method.startswith("quest") else "80%", "max_new": 5, "keep_logits": True}
    with_phases = run(tiny, prompt, method, sink=timed, phases=True, **settings)
    without = run(tiny, prompt, method, sink=untimed, **settings)
    assert with_phases.ids == without.ids
    assert all((a == b).all() for a, b in zip(with_phases.logits, without.logits, strict=True))
    assert all(record.phases is None for record in untimed.steps)
    for record in timed.steps:
        assert record.phases is not None
        assert set(record.phases) == {*PHASES, REST}
        assert abs(sum(record.phases.values()) - record.dur_us) <= len(PHASES) + 1
        assert record.phases["attend"] > 0
