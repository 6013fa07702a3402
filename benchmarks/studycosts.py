"""What a study takes beside decoding: CPU and wall seconds by phase of prompts x methods x budgets on SmolLM2.

    python -m benchmarks.studycosts [--prompts 3] [--new 64] [--tokens 1024] [--budgets 10%,20%,30%,40%]
        [--methods snapkv,streaming_llm,h2o,compresskv,keydiff] [--level heads] [--out FILE]

All methods use one prefill of a prompt. `over_decoding` divides a study's seconds by its seconds of decoding. Loading,
prefills and the prompts' surprisals do not count; a study that only decodes has 1. Decoding includes recording, and the
run of full KV that the arms are compared with. A phase ends when the study reports the next one: `decode` includes a
trial's self-checks, and `store` includes the figures of its row.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import kvlens
from kvlens.engine.prefill import Surprisals
from kvlens.models.device import machine
from kvlens.runs.races import Entrant
from kvlens.runs.request import RunRequest
from kvlens.studies import storage
from kvlens.studies.plan import StudyPlan
from kvlens.studies.promptfile import read_prompts
from kvlens.studies.running import carry_out
from kvlens.tasks.encoding import encoding

MODEL = "smollm2"
ONCE = ("load", "prefill", "surprisals")
"""what a prompt, or the study, has once"""
DECODING = ("decode", "reference")
"""of the arms, and of the full KV that they are compared with"""


class Phases:
    """Adds up the seconds of each phase that a study reports (kvlens.studies.running.Audience)."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        """phase -> CPU and wall seconds"""
        self._inside = False
        """True while surprisals are computed: `surprisals` times them"""
        self._phase, self._since = "", (time.process_time(), time.perf_counter())

    def report(self, phase: str, number: int, total: int) -> None:
        """Give the time since the last report to the phase that was under way."""
        now = time.process_time(), time.perf_counter()
        if self._phase and not self._inside:
            spent = self.seconds.setdefault(self._phase, [0.0, 0.0])
            for clock in range(2):
                spent[clock] += now[clock] - self._since[clock]
        self._phase, self._since = phase, now

    @contextmanager
    def surprisals(self) -> Iterator[None]:
        """Time the surprisals of whole prompts. They are computed inside other phases and do not count there."""
        whole = Surprisals.whole

        def timed(*args: Any, **named: Any) -> Any:
            self.report(self._phase, 0, 0)
            self._inside, start_times = True, self._since
            try:
                return whole(*args, **named)
            finally:
                self._inside = False
                self._since = time.process_time(), time.perf_counter()
                for clock in range(2):
                    self.seconds["surprisals"][clock] += self._since[clock] - start_times[clock]

        self.seconds["surprisals"] = [0.0, 0.0]
        with patch.object(Surprisals, "whole", timed):
            yield

    def trial(self, finished: int, total: int, *rest: Any) -> None:
        """Trials are counted from what the study stored."""


def measure(
    prompts: int, tokens: int, new: int, methods: Sequence[str], budgets: Sequence[str], level: str
) -> dict[str, Any]:
    """Carry out a study and return its trials, its seconds by phase and `over_decoding`, CPU and wall."""
    torch.set_num_threads(1)
    drawn = read_prompts([f"niah_single@length={tokens}@prompts={prompts}"], lambda: encoding(MODEL)).prompts
    shared = RunRequest(model=MODEL, max_new=new, ignore_eos=True, trace_level=level)
    entrants = tuple(Entrant(method=method) for method in methods)
    plan = StudyPlan(shared=shared, entrants=entrants, budgets=tuple(budgets))
    phases = Phases()
    with tempfile.TemporaryDirectory() as folder:
        info = storage.create(Path(folder), plan, drawn)
        with phases.surprisals():
            carry_out(Path(folder), info.id, phases, lambda: False)
        phases.report("", 0, 0)
        trials = storage.read_trials(Path(folder), info.id)
    states = [trial.state for trial in trials]
    assert set(states) == {"completed"}, states
    totals = [sum(spent[clock] for spent in phases.seconds.values()) for clock in range(2)]
    once, decoding = (
        [sum(phases.seconds[name][clock] for name in names if name in phases.seconds) for clock in range(2)]
        for names in (ONCE, DECODING)
    )
    ratios = [round((totals[clock] - once[clock]) / decoding[clock], 3) for clock in range(2)]
    figures = {"trials": len(trials), "seconds": {k: [round(x, 2) for x in v] for k, v in phases.seconds.items()}}
    return figures | {"over_decoding_cpu": ratios[0], "over_decoding_wall": ratios[1]}


def main() -> None:
    """Measure one study, print it and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--methods", default="snapkv,streaming_llm,h2o,compresskv,keydiff")
    parser.add_argument("--budgets", default="10%,20%,30%,40%")
    parser.add_argument("--level", default="heads")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    methods, budgets = options.methods.split(","), options.budgets.split(",")
    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "version": kvlens.__version__,
        "machine": machine(),
        "model": MODEL,
    }
    about |= {name: getattr(options, name) for name in ("prompts", "tokens", "new", "level")}
    about |= {"methods": methods, "budgets": budgets, "load_before": round(os.getloadavg()[0], 1)}
    figures = measure(options.prompts, options.tokens, options.new, methods, budgets, options.level)
    result = about | figures | {"load_after": round(os.getloadavg()[0], 1)}
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
