"""What carries out a sweep's trials: a worker, which is the same in this process, in one of its own, and as an actor of
a Ray cluster."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvlens.lab.bench.sweep.place import Place
from kvlens.lab.bench.sweep.request import SweepRequest
from kvlens.lab.bench.trialprompts import Trial
from kvlens.runs.carrying import give_back
from kvlens.workers.lanes import Crew, Job, Lane, open_lanes


class Worker:
    """Loads the model once and runs trials, one at a time."""

    def __init__(self, place: Place) -> None:
        import torch

        from kvlens.lab.bench.trialprompts import Formats
        from kvlens.runs.request import SMALL

        self.place = place
        self.formats = Formats(place.model, place.device, place.dtype, names=tuple(place.origins))
        self.engine, self.prompts = self.formats.at(place.dtype)
        if self.engine.loaded.info["parameters"] < SMALL:
            torch.set_num_threads(1)

    def key(self, trial: Trial) -> str:
        """By which a trial is known: what was asked, and a hash of its prompt."""
        try:
            prompt = hashlib.sha256(self.prompts.asked(trial).text.encode()).hexdigest()
        except ValueError:
            prompt = ""
        usual = {"question": "in", "dtype": ""}
        request = [value for name, value in asdict(trial).items() if (name, value) not in usual.items()]
        sentence = json.dumps([self.place.origins[trial.method], *request, prompt])
        return hashlib.sha256(sentence.encode()).hexdigest()[:16]

    def run(self, trial: Trial) -> dict[str, Any]:
        """The trial's row. Raises what the engine raises, other than refusals and infeasible budgets, which are
        rows."""
        from kvlens.lab.bench.trials import carry_out

        enabled = self.formats.of(trial)
        try:
            if self.place.runs is None:
                return {"key": self.key(trial), **carry_out(*enabled, trial)}
            from kvlens.lab.bench.sweep.trace import carry_out_stored

            return {"key": self.key(trial), **carry_out_stored(*enabled, trial, self.place, Path(self.place.runs))}
        finally:
            give_back()


def lanes(request: SweepRequest, place: Place) -> list[Lane]:
    """Return the workers that a request asks for. Raises ValueError where Ray is asked for and is not installed."""
    job = Job(Worker, place, trial_name, place.device.startswith("cuda"))
    return open_lanes(Crew(request.workers, request.ray), job)


def trial_name(trial: Trial) -> str:
    """A trial in words."""
    return (
        f"{trial.task} {trial.length} tokens depth {trial.depth} #{trial.index}, {trial.method} "
        f"{trial.budget or 'no limit'}"
    )
