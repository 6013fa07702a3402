"""Who carries out a sweep's trials: one worker in this process, several in processes of their own, or actors of a Ray cluster. The
worker's code is the same in all three."""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvlens.bench.trials import Trial

if TYPE_CHECKING:
    from kvlens.bench.sweep import SweepRequest

WAIT_S = 0.2
"""how often the main thread looks whether it was asked to stop"""


@dataclass(frozen=True)
class Place:
    """Where trials are run: what a worker must know, picklable."""

    model: str
    device: str
    dtype: str
    origins: dict[str, str]
    """method -> what makes its trials comparable"""
    runs: str | None
    """folder of the runs; None: no traces are stored"""


class Worker:
    """Loads the model once and runs trials, one at a time."""

    def __init__(self, place: Place) -> None:
        import torch

        from kvlens.bench.trials import Prompts
        from kvlens.engine import Engine
        from kvlens.models import load
        from kvlens.runs import SMALL

        self.place = place
        loaded = load(place.model, place.device, place.dtype)
        if loaded.info["parameters"] < SMALL:
            torch.set_num_threads(1)
        self.engine = Engine(loaded)
        self.prompts = Prompts(self.engine)

    def key(self, trial: Trial) -> str:
        """By which a trial is known: what was asked, and a hash of its prompt."""
        try:
            prompt = hashlib.sha256(self.prompts.asked(trial).text.encode()).hexdigest()
        except ValueError:
            prompt = ""
        said = json.dumps([self.place.origins[trial.method], *astuple(trial), prompt])
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def run(self, trial: Trial) -> dict[str, Any]:
        """The trial's row. Raises what the engine raises, other than refusals and infeasible budgets, which are rows."""
        from kvlens.bench.trials import carry_out

        if self.place.runs is None:
            return {"key": self.key(trial), **carry_out(self.engine, self.prompts, trial)}
        from kvlens.bench.sweeptrace import carry_out_stored

        return {"key": self.key(trial), **carry_out_stored(self.engine, self.prompts, trial, self.place, Path(self.place.runs))}


class Lane(Protocol):
    """A worker as the coordinator sees it: `key` and `run` as of Worker, and an end."""

    def key(self, trial: Trial) -> str: ...
    def run(self, trial: Trial) -> dict[str, Any]: ...
    def close(self) -> None: ...


class LocalLane:
    """A worker in this process, made when it is first needed."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.worker: Worker | None = None

    def _ready(self) -> Worker:
        if self.worker is None:
            self.worker = Worker(self.place)
        return self.worker

    def key(self, trial: Trial) -> str:
        return self._ready().key(trial)

    def run(self, trial: Trial) -> dict[str, Any]:
        return self._ready().run(trial)

    def close(self) -> None:
        self.worker = None


class ProcessLane:
    """A worker in a process of its own. It ends when this process does, however that ends: its pipe breaks."""

    def __init__(self, place: Place) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, place), daemon=True, name="kvlens-sweep")
        self._process.start()
        theirs.close()

    def _ask(self, what: str, trial: Trial) -> Any:
        try:
            self._pipe.send((what, trial))
            kind, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise WorkerLost(f"a worker process ended with code {self._process.exitcode} in trial {_name(trial)}") from None
        if kind == "error":
            raise answer
        return answer

    def key(self, trial: Trial) -> str:
        return str(self._ask("key", trial))

    def run(self, trial: Trial) -> dict[str, Any]:
        return dict(self._ask("run", trial))

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


class RayLane:
    """A worker as an actor of a Ray cluster."""

    def __init__(self, ray: Any, place: Place) -> None:
        self._ray = ray
        needs = {"num_gpus": 1} if place.device.startswith("cuda") else {"num_cpus": 1}
        self._actor = ray.remote(**needs)(Worker).remote(place)

    def key(self, trial: Trial) -> str:
        return str(self._ray.get(self._actor.key.remote(trial)))

    def run(self, trial: Trial) -> dict[str, Any]:
        return dict(self._ray.get(self._actor.run.remote(trial)))

    def close(self) -> None:
        self._ray.kill(self._actor)


class WorkerLost(ValueError):
    """A worker died; what it had finished is kept."""


def serve(pipe: Connection, place: Place) -> None:
    """A worker process: answers until the pipe is closed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker: Worker | None = None
    while True:
        try:
            what, trial = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            worker = worker or Worker(place)
            answer: tuple[str, Any] = ("answer", getattr(worker, what)(trial))
        except Exception as error:
            answer = ("error", WorkerLost(f"trial {_name(trial)} failed: {type(error).__name__}: {error}"))
        try:
            pipe.send(answer)
        except OSError:
            return


def lanes(request: SweepRequest, place: Place) -> list[Lane]:
    """The workers a request asks for. Raises ValueError when Ray is asked for and not installed."""
    if request.ray is not None:
        try:
            ray = importlib.import_module("ray")
        except ImportError:
            raise ValueError("--ray was given, but the package ray is not installed: install it, or use --workers.") from None
        ray.init(address=request.ray, ignore_reinit_error=True)
        return [RayLane(ray, place) for _ in range(request.workers)]
    if request.workers > 1:
        return [ProcessLane(place) for _ in range(request.workers)]
    return [LocalLane(place)]


def run_lanes(
    workers: list[Lane], groups: list[list[Trial]], known: Callable[[str], bool], finished: Callable[[dict[str, Any]], None],
    stop: Callable[[], bool],
) -> None:  # fmt: skip
    """Every group (the trials of one prompt) goes to one worker, so that its prompt is read once. `known` and `finished` are called on
    this thread only. Raises WorkerLost when a worker died, after the others have ended."""
    waiting = deque(groups)
    try:
        if len(workers) == 1:
            for group in groups:
                for trial in group:
                    if stop():
                        return
                    if not known(workers[0].key(trial)):
                        finished(workers[0].run(trial))
            return
        _run_threads(workers, waiting, known, finished, stop)
    finally:
        for worker in workers:
            worker.close()


def _run_threads(
    workers: list[Lane], waiting: deque[list[Trial]], known: Callable[[str], bool], finished: Callable[[dict[str, Any]], None],
    stop: Callable[[], bool],
) -> None:  # fmt: skip
    inbox: queue.Queue[tuple[str, Any, queue.Queue[bool]]] = queue.Queue()
    ending = threading.Event()

    def follow(worker: Lane) -> None:
        answer: queue.Queue[bool] = queue.Queue()
        try:
            while not ending.is_set():
                try:
                    group = waiting.popleft()
                except IndexError:
                    break
                for trial in group:
                    if ending.is_set():
                        break
                    inbox.put(("key", worker.key(trial), answer))
                    if not answer.get():
                        inbox.put(("row", worker.run(trial), answer))
        except BaseException as error:
            inbox.put(("lost", error, answer))
        inbox.put(("end", None, answer))

    threads = [threading.Thread(target=follow, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    running, lost = len(threads), []
    while running:
        try:
            what, value, answer = inbox.get(timeout=WAIT_S)
        except queue.Empty:
            what, value, answer = "", None, queue.Queue()
        if what == "key":
            answer.put(known(value))
        elif what == "row":
            finished(value)
        elif what == "lost":
            lost.append(value)
        elif what == "end":
            running -= 1
        if stop():
            ending.set()
    if lost:
        raise WorkerLost(f"{lost[0]}; what was finished is kept: run the sweep again to go on.") from lost[0]


def _name(trial: Trial) -> str:
    return f"{trial.task} {trial.length} tokens depth {trial.depth} #{trial.index}, {trial.method} {trial.budget or 'no limit'}"
