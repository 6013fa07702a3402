"""Hands groups of items to workers, and returns what they finish to the thread that asked."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvlens.workers.lanes import Lane, WorkerDied, WorkerLost
from kvlens.workers.waiting import WaitingGroups

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
    """Carry all items out. A group goes to one worker, so that its prompt is read once. What a dead worker left of its
    group goes to another.

    Args:
        finished: hears of every result, on this thread.
        stop: asked on this thread; no item begins once it returns True.
        is_done: on this thread, whether the item of a key was done before; None: none was.
        kept_words: the end of the sentence on a lost worker.

    Raises WorkerLost, after all workers have ended, where an item failed, or where workers died and left items that
    nobody carried out.
    """
    try:
        if len(workers) == 1:
            for group in groups:
                for item in group:
                    if stop():
                        return
                    if is_done is None or not is_done(workers[0].key(item)):
                        finished(workers[0].run(item))
            return
        _run_threads(workers, WaitingGroups(groups), finished, stop, is_done, kept_words)
    finally:
        for worker in workers:
            worker.close()


def _run_threads(
    workers: list[Lane],
    waiting: WaitingGroups,
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
            while (group := waiting.take()) is not None:
                for place, item in enumerate(group):
                    if ending.is_set():
                        return
                    try:
                        if not is_known(item):
                            inbox.put(("row", worker.run(item), answer))
                    except WorkerDied as death:
                        inbox.put(("died" if waiting.give_back(group[place:]) else "lost", death, answer))
                        return
                waiting.end()
        except BaseException as error:
            waiting.end()
            inbox.put(("lost", error, answer))
        finally:
            inbox.put(("end", None, answer))

    threads = [threading.Thread(target=follow, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    running = len(threads)
    lost: list[BaseException] = []
    died: list[BaseException] = []
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
        elif subject == "died":
            died.append(value)
        elif subject == "end":
            running -= 1
        if stop():
            ending.set()
            waiting.close()
    if died and not ending.is_set() and not waiting.empty:
        lost += died
    if lost:
        raise WorkerLost(f"{lost[0]}; {kept_words}.", getattr(lost[0], "code", None)) from lost[0]
