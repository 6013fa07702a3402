"""Where workers are, and how one is asked: in this process, in a process of its own, or as an actor of a Ray cluster.
All three run the same worker class."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kvlens.refusal import Refusal
from kvlens.storeys import MissingExtra


class WorkerLost(ValueError):
    """A worker died, or could not carry out an item; what was finished is kept. code: of the error that it met, if it
    has one."""

    def __init__(self, sentence: str, code: str | None = None) -> None:
        super().__init__(sentence, code)
        self.sentence, self.code = sentence, code

    def __str__(self) -> str:
        return self.sentence


class WorkerDied(WorkerLost):
    """A worker ended without an answer: its process, its actor or its machine is gone. Another worker may carry out
    the item."""


@dataclass(frozen=True)
class Job:
    """What all workers of a job have in common. All of it can be pickled."""

    worker: Callable[[Any], Any]
    """makes a worker of the place; a class at the top of a module"""
    place: Any
    """what a worker must know"""
    words: Callable[[Any], str]
    """names an item in a sentence"""
    uses_gpu: bool = False


class BadCrew(Refusal):
    """Workers that cannot share a job."""


@dataclass(frozen=True)
class Crew:
    """How many workers there are, and where. Raises BadCrew `batch_with_workers` for a batch of several workers."""

    workers: int = 1
    ray: str | None = None
    """address of a Ray cluster; None: processes of this machine"""
    batch: int = 1
    """items that one worker in this process carries out at once, where its kind of item allows that"""

    def __post_init__(self) -> None:
        for name, count in (("workers", self.workers), ("batch", self.batch)):
            if count < 1:
                raise ValueError(f"{name}={count}: there is at least one.")
        if self.batch > 1 and not self.here:
            sentence = "a batch has one worker: set workers to 1, no ray, or batch to 1."
            raise BadCrew(sentence, code="batch_with_workers", workers=self.workers, batch=self.batch)

    @property
    def here(self) -> bool:
        """One worker, in this process."""
        return self.workers == 1 and self.ray is None


def resuming_crew(workers: int, ray: str | None, batch: int | None) -> Crew | None:
    """Return the crew that goes on with a study; None: one worker here, with the study's own batch."""
    return None if (workers, ray, batch) == (1, None, None) else Crew(workers, ray, batch or 1)


class Lane(Protocol):
    """A worker as the coordinator sees it."""

    def key(self, item: Any) -> str:
        """Return the name by which a finished item is known again."""
        ...

    def run(self, item: Any) -> Any:
        """Carry an item out. Raises WorkerDied where the worker is gone, WorkerLost where the item failed."""
        ...

    def close(self) -> None:
        """End the worker."""
        ...


class LocalLane:
    """A worker in this process, made when it is first needed."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._worker: Any = None

    def _ready(self) -> Any:
        if self._worker is None:
            self._worker = self._job.worker(self._job.place)
        return self._worker

    def key(self, item: Any) -> str:
        """See Lane."""
        return str(self._ready().key(item))

    def run(self, item: Any) -> Any:
        """See Lane."""
        return self._ready().run(item)

    def close(self) -> None:
        """See Lane."""
        self._worker = None


class ProcessLane:
    """A worker in a process of its own. It ends when this process does, however that ends: its pipe breaks."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self._words = job.words
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, job), daemon=True, name="kvlens-worker")
        self._process.start()
        theirs.close()

    def _ask(self, subject: str, item: Any) -> Any:
        try:
            self._pipe.send((subject, item))
            kind, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise WorkerDied(
                f"a worker process ended with code {self._process.exitcode} in trial {self._words(item)}"
            ) from None
        if kind == "error":
            raise answer
        return answer

    def key(self, item: Any) -> str:
        """See Lane."""
        return str(self._ask("key", item))

    def run(self, item: Any) -> Any:
        """See Lane."""
        return self._ask("run", item)

    def close(self) -> None:
        """See Lane."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


class RayLane:
    """A worker as an actor of a Ray cluster."""

    def __init__(self, ray: Any, job: Job) -> None:
        self._ray, self._words = ray, job.words
        needs = {"num_gpus": 1} if job.uses_gpu else {"num_cpus": 1}
        self._actor = ray.remote(**needs)(job.worker).remote(job.place)

    def _wait(self, answer: Any, item: Any) -> Any:
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayActorError as error:
            raise WorkerDied(f"an actor of the Ray cluster ended in trial {self._words(item)}") from error

    def key(self, item: Any) -> str:
        """See Lane."""
        return str(self._wait(self._actor.key.remote(item), item))

    def run(self, item: Any) -> Any:
        """See Lane."""
        return self._wait(self._actor.run.remote(item), item)

    def close(self) -> None:
        """See Lane."""
        self._ray.kill(self._actor)


def open_lanes(crew: Crew, job: Job) -> list[Lane]:
    """Return the workers of a crew. Raises MissingExtra where Ray is asked for and is not installed."""
    if crew.ray is not None:
        try:
            ray = importlib.import_module("ray")
        except ImportError:
            raise MissingExtra("ray") from None
        ray.init(address=crew.ray, ignore_reinit_error=True)
        return [RayLane(ray, job) for _ in range(crew.workers)]
    if crew.workers > 1:
        return [ProcessLane(job) for _ in range(crew.workers)]
    return [LocalLane(job)]


def serve(pipe: Connection, job: Job) -> None:
    """A worker process: answers until the pipe is closed. Ctrl-C reaches it too, and is the coordinator's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker: Any = None
    while True:
        try:
            subject, item = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            worker = worker or job.worker(job.place)
            answer: tuple[str, Any] = ("answer", getattr(worker, subject)(item))
        except Exception as error:
            sentence = f"trial {job.words(item)} failed: {type(error).__name__}: {str(error).rstrip('.')}"
            answer = ("error", WorkerLost(sentence, getattr(error, "code", None)))
        try:
            pipe.send(answer)
        except OSError:
            return
