"""Carries out the trials of several prompts at once, whose decode steps are computed together.

A prompt has a thread, a runner and a place in the batch. One thread works at a time; it hands on where it waits for its
step, and the step is computed once all wait. So prompts are read one by one, and a prompt that ends makes room for the
next one. Every trial is stored as soon as it has ended, as in a study without a batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from kvlens.engine.batch import Seat, StepBatch
from kvlens.runs.request import Report
from kvlens.runs.turns import Hearing, Turns


class Runner(Protocol):
    """What runs the items of a prompt."""

    def end_prompt(self) -> None:
        """Give back the memory of the prompt whose items have been run."""


ItemRunner = TypeVar("ItemRunner", bound=Runner)
Item = TypeVar("Item")
Result = TypeVar("Result")


def carry_out_together(
    size: int,
    groups: Sequence[Sequence[Item]],
    runner_at: Callable[[Seat | None, Report, Callable[[], bool]], ItemRunner],
    run: Callable[[ItemRunner, Item], Result | None],
    finished: Callable[[Result], None],
    report: Report,
    cancelled: Callable[[], bool],
) -> Counter[int]:
    """Carry all items out -> number of prompts -> decode steps that so many prompts had together.

    Args:
        size: prompts at once, at most.
        groups: the items of a prompt each; they have one runner, one after the other.
        runner_at: makes the runner of a place, which is None where one prompt is all; its report and whether it should
            stop.
        run: an item's result; None: it was cancelled.
        finished, report: are called on this thread.

    Raises what a runner or `finished` raised, after all threads have ended.
    """
    lanes = min(size, len(groups))
    waiting, hearing, turns, batch = deque(groups), Hearing(), Turns(lanes), StepBatch()
    errors: list[BaseException] = []

    def stop() -> bool:
        return hearing.broken is not None or bool(errors) or cancelled()

    def run_lane(lane: int) -> None:
        turns.wait(lane)
        try:
            seat = Seat(batch, partial(turns.hand_on, lane)) if lanes > 1 else None
            runner = runner_at(seat, partial(hearing.tell, report), stop)
            while waiting:
                for item in waiting.popleft():
                    result = None if stop() else run(runner, item)
                    if result is None:
                        return
                    hearing.tell(finished, result)
                runner.end_prompt()
        except BaseException as error:
            errors.append(error)
        finally:
            turns.leave(lane)

    if lanes:
        hearing.run([partial(run_lane, lane) for lane in range(lanes)])
    if errors:
        raise errors[0]
    return batch.passes
