"""Where a sweep's workers are: one in this process, several in processes of their own, or actors of a Ray cluster; and
how trials are handed to them."""

from __future__ import annotations

import importlib
import multiprocessing
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kvlens.lab.bench.sweep.place import Place
from kvlens.lab.bench.sweep.request import SweepRequest
from kvlens.lab.bench.sweep.work import Worker, WorkerLost, serve, trial_name
from kvlens.lab.bench.trials import Trial

WAIT_S = 0.2
"""how often the main thread looks whether it was asked to stop"""


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

    def _ask(self, text: str, trial: Trial) -> Any:
        try:
            self._pipe.send((text, trial))
            kind, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise WorkerLost(
                f"a worker process ended with code {self._process.exitcode} in trial {trial_name(trial)}"
            ) from None
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


def lanes(request: SweepRequest, place: Place) -> list[Lane]:
    """The workers a request asks for. Raises ValueError when Ray is asked for and not installed."""
    if request.ray is not None:
        try:
            ray = importlib.import_module("ray")
        except ImportError:
            raise ValueError(
                "--ray was given, but the package ray is not installed: install it, or use --workers."
            ) from None
        ray.init(address=request.ray, ignore_reinit_error=True)
        return [RayLane(ray, place) for _ in range(request.workers)]
    if request.workers > 1:
        return [ProcessLane(place) for _ in range(request.workers)]
    return [LocalLane(place)]


def run_lanes(
    workers: list[Lane],
    groups: list[list[Trial]],
    function: Callable[[str], bool],
    finished: Callable[[dict[str, Any]], None],
    stop: Callable[[], bool],
) -> None:
    """Every group (the trials of one prompt) goes to one worker, so that its prompt is read once. `function` and
    `finished` are called on this thread only. Raises WorkerLost when a worker died, after the others have ended."""
    waiting = deque(groups)
    try:
        if len(workers) == 1:
            for group in groups:
                for trial in group:
                    if stop():
                        return
                    if not function(workers[0].key(trial)):
                        finished(workers[0].run(trial))
            return
        _run_threads(workers, waiting, function, finished, stop)
    finally:
        for worker in workers:
            worker.close()


def _run_threads(
    workers: list[Lane],
    waiting: deque[list[Trial]],
    function: Callable[[str], bool],
    finished: Callable[[dict[str, Any]], None],
    stop: Callable[[], bool],
) -> None:
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
            subject, value, answer = inbox.get(timeout=WAIT_S)
        except queue.Empty:
            subject, value, answer = "", None, queue.Queue()
        if subject == "key":
            answer.put(function(value))
        elif subject == "row":
            finished(value)
        elif subject == "lost":
            lost.append(value)
        elif subject == "end":
            running -= 1
        if stop():
            ending.set()
    if lost:
        raise WorkerLost(f"{lost[0]}; what was finished is kept: run the sweep again to go on.") from lost[0]
