"""The phases of a step add up to its duration, and timing them changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support import ListSink, random_prompt, run

from kvlens import instruments
from kvlens.app.figures.phases import by_run, by_step
from kvlens.instruments import PHASES, REST, NoClock, PhaseClock
from kvlens.store.reader import TraceReader
from kvlens.tables.latency import latency, phase_means
from tests.synthetic import write_synthetic


def test_time_belongs_to_the_phase_that_was_entered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 5_000, 9_000, 10_000, 12_000, 20_000])
    monkeypatch.setattr(instruments.time, "perf_counter_ns", lambda: next(ticks))
    clock = PhaseClock()
    assert clock.enter("score") == REST
    assert clock.enter("attend") == "score"
    assert clock.enter("score") == "attend"
    assert clock.enter(REST) == "score"
    spent = clock.take(30_000)
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


def test_latencies_come_from_recorded_times(tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 10, 4, seed=1, prefill_s=0.25)
    with TraceReader.open(tmp_path, uid) as reader:
        times, took = latency(reader), reader.steps()["dur_us"]
        assert times.first_token == 250_000 + took[0]
        assert times.per_token == pytest.approx(took[1:].mean())
        assert times.end_to_end == 250_000 + took.sum()
        means = phase_means(reader)
        assert sum(means.values()) == pytest.approx(took.mean())
        figure = by_step(reader.phases())
        assert sum(sum(bar.y) for bar in figure.data) * 1000 == pytest.approx(took.sum())
        (bars,) = zip(*(bar.y for bar in by_run({"A": means}).data), strict=True)
        assert sum(bars) * 1000 == pytest.approx(took.mean())


def test_the_first_token_is_the_answers_and_a_prompt_read_by_another_run_has_no_time(tmp_path: Path) -> None:
    asked = write_synthetic(tmp_path, 2, 4, 2, 10, 4, seed=1, prefill_s=0.25, question_tokens=3)
    kept = write_synthetic(tmp_path, 2, 4, 2, 10, 4, seed=1, prefill_s=0.25, prompt_kept=True)
    with TraceReader.open(tmp_path, asked) as reader:
        took = reader.steps()["dur_us"]
        assert latency(reader).first_token == 250_000 + took[:4].sum()
        assert latency(reader).per_token == pytest.approx(took[4:].mean())
    with TraceReader.open(tmp_path, kept) as reader:
        assert math.isnan(latency(reader).first_token)
        assert latency(reader).per_token > 0
