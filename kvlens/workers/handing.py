"""Hands groups of items to workers, and returns what they finish to the thread that asked."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvlens.workers.lanes import Lane, WorkerLost

WAIT_S = 0.2
"""how often the main thread looks whether it was asked to stop"""


def hand_out(
    workers: list[Lane],
    groups: Sequence[Sequence[Any]],
    finished: Callable[[Any], None],
    stop: Callable[[], bool],
    is_done: Callable[[str], bool] | None = None,
    kept_words: str = "what was finished is kept: run it again to go on",
) -> None:
    """Carry all items out. A group goes to one worker, so that its prompt is read once.

    Args:
        finished: hears of every result, on this thread.
        stop: asked on this thread; no item begins once it returns True.
        is_done: on this thread, whether the item of a key was done before; None: none was.
        kept_words: the end of the sentence on a lost worker.

    Raises WorkerLost where a worker died, after the others have ended.
    """
    waiting = deque(groups)
    try:
        if len(workers) == 1:
            for group in groups:
                for item in group:
                    if stop():
                        return
                    if is_done is None or not is_done(workers[0].key(item)):
                        finished(workers[0].run(item))
            return
        _run_threads(workers, waiting, finished, stop, is_done, kept_words)
    finally:
        for worker in workers:
            worker.close()


def _run_threads(
    workers: list[Lane],
    waiting: deque[Sequence[Any]],
    finished: Callable[[Any], None],
    stop: Callable[[], bool],
    is_done: Callable[[str], bool] | None,
    kept_words: str,
) -> None:
    inbox: queue.Queue[tuple[str, Any, queue.Queue[bool]]] = queue.Queue()
    ending = threading.Event()

    def follow(worker: Lane) -> None:
        answer: queue.Queue[bool] = queue.Queue()

        def is_known(item: Any) -> bool:
            if is_done is None:
                return False
            inbox.put(("key", worker.key(item), answer))
            return answer.get()

        try:
            while not ending.is_set():
                try:
                    group = waiting.popleft()
                except IndexError:
                    break
                for item in group:
                    if ending.is_set():
                        break
                    if not is_known(item):
                        inbox.put(("row", worker.run(item), answer))
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
        if subject == "key" and is_done is not None:
            answer.put(is_done(value))
        elif subject == "row":
            finished(value)
        elif subject == "lost":
            lost.append(value)
        elif subject == "end":
            running -= 1
        if stop():
            ending.set()
    if lost:
        raise WorkerLost(f"{lost[0]}; {kept_words}.", getattr(lost[0], "code", None)) from lost[0]
