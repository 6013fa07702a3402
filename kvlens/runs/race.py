"""A race: one prompt under several methods at one budget, in one process. The model is loaded once and the prompt read
once; full KV runs first, then all methods decode together, one step each in turn, each compared with full KV.

Every lane is an ordinary stored run, the one that it would be alone. A lane has a thread, and the turn is handed
on where the engine asks between two steps whether to stop: only one lane computes at any time, and a step's time is its
own. Copies that were begun go on while the others have their turn, so what a step waits for them comes out short (meta
`raced`).
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens import methods
from kvlens.budget import BudgetInfeasible
from kvlens.hangs import abandoning
from kvlens.methods.faults import MethodFault, hangs, stray
from kvlens.models.device import give_back_heap, settle
from kvlens.runs.lanes import LaneLog, sizes_of_lanes
from kvlens.runs.lineup import Lineup
from kvlens.runs.memory import MemoryNeed, check_race_memory
from kvlens.runs.preflight import refuse
from kvlens.runs.preparing import Pairing, Prepared, advice, check, plan, prepare, reference_key, sizes_of
from kvlens.runs.races import REFUSED, RaceInfo, RaceRequest, new_id, write
from kvlens.runs.readings import fits, keeping
from kvlens.runs.request import BY_NAME, ModelSource, RunRequest
from kvlens.runs.trace import SURPRISAL_PHASE
from kvlens.runs.turns import Hearing, Turns
from kvlens.runs.watching import Audience, Watched
from kvlens.shortage import Shortage
from kvlens.store.errors import TraceError
from kvlens.store.runinfo import now
from kvlens.text.prompts import PromptText

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference


def race(
    request: RaceRequest,
    source: PromptText,
    runs_dir: Path,
    audience: Audience,
    cancelled: Callable[[], bool],
    models: ModelSource = BY_NAME,
) -> RaceInfo:
    """Run and store -> the race as it is stored. A method that is refused or fails is a lane that says why; the others
    go on. Cancelled, every lane keeps what was recorded of it.

    Raises ValueError with one sentence for whatever is wrong with the prompt or the model, where every method is
    refused, and when it was cancelled before full KV had ended; TraceError when the race cannot be stored.
    """
    return _Race(request, source, runs_dir, audience, cancelled, models).run()


class _Race:
    """One race on its way. What is said of it belongs to the thread that carries it out; lanes tell it by events."""

    def __init__(
        self,
        request: RaceRequest,
        source: PromptText,
        runs_dir: Path,
        audience: Audience,
        cancelled: Callable[[], bool],
        models: ModelSource,
    ) -> None:
        request.check()
        shared = request.shared.model_copy(update={"device": settle(request.shared.device)})
        request = request.model_copy(update={"shared": shared})
        self._source, self._runs, self.audience, self._cancelled = source, runs_dir, audience, cancelled
        self._models = models
        self.hearing = Hearing()
        self._lineup = lineup = Lineup(request)
        self._requests, self._lanes = lineup.requests, lineup.lanes
        self._info = RaceInfo(
            id=new_id(),
            created=now(),
            model=shared.model,
            budget=request.budget,
            max_new=shared.max_new,
            answer=source.answer,
            request=request.model_dump(mode="json"),
            lanes=lineup.lanes,
        )
        self._log = LaneLog(self._info, source, audience, self._write)
        self._prepared: Prepared
        self._reference: Reference | None = None
        self._threads = 0
        """of torch, for every lane"""
        self._steps: dict[int, int] = {}
        """that each lane has made"""
        self._decoding: set[int] = set()
        """places of lanes whose output is not whole yet; the others wait for them before they explain"""

    def run(self) -> RaceInfo:
        """Carries it out."""
        audience, reference, lineup = self.audience, self._requests[0], self._lineup
        self._foresee(reference)
        check_race_memory(reference, lineup.refuse(self._foresee))
        self._prepared = prepare(reference, self._source, audience.report, models=self._models)
        plan(reference, self._prepared)
        lineup.refuse(partial(lineup.plan, prepared=self._prepared))
        entered = lineup.entered()
        reading = keeping([methods.get(self._lanes[n].method) for n in entered], in_turns=True)
        self._prepared = replace(self._prepared, kept=reading)
        import torch

        self._threads = torch.get_num_threads()
        self._info.sizes = sizes_of_lanes(self._prepared, self._info.max_new)
        audience.begun(self._info)
        for number, lane in enumerate(self._lanes):
            if lane.state == REFUSED:
                audience.lane(number, lane)
        try:
            self.hearing.run([self._full])
            turns = Turns(len(entered))
            self._decoding = set(range(len(entered)))
            self.hearing.run([partial(self._method, n, turns, place) for place, n in enumerate(entered)])
        finally:
            self._write()
            give_back_heap()
        return self._info

    def _foresee(self, request: RunRequest) -> MemoryNeed | None:
        check(request)
        return refuse(request, self._source) if self._models.named else None

    # ------------------------------------------------------------------------------------------------------- the lanes
    def _stop(self) -> bool:
        return self.hearing.broken is not None or self._cancelled()

    def _full(self) -> None:
        """Lane 0, stored before or made now."""
        import torch

        from kvlens.runs.reference import obtain

        torch.set_num_threads(self._threads)
        watched = self._watched(0)
        try:
            self._reference = obtain(
                self._prepared,
                self._requests[0],
                self._runs,
                partial(self.hearing.tell, self.audience.report),
                self._stop,
                watched,
            )
        except Exception as error:
            self.hearing.tell(_raise, error)
            return
        self.hearing.tell(self._log.show_stored, 0, self._runs, self._reference.uid, not watched.made)

    def _method(self, number: int, turns: Turns, place: int) -> None:
        """A lane under a method; nothing of it is done but in its turn."""
        import torch

        from kvlens.runs.storing import store

        request, prepared, reference = self._requests[number], self._prepared, self._reference
        assert reference is not None
        decoding, last = False, len(self._lineup.entered()) - 1

        def report(phase: str, done: int, total: int) -> None:
            nonlocal decoding
            decoding = phase in ("decode", SURPRISAL_PHASE, "effect")
            if phase == "decode":
                if place == last and prepared.kept is not None and not fits(prepared, planned):
                    prepared.kept.read = None  # all are placed: it is made again for what left full KV
                self.hearing.tell(self._step, number, done, total)
            elif phase in ("prefill", "place"):
                self.hearing.tell(self._report_phase, number, phase, done, total)

        def cancelled() -> bool:
            if decoding and not turns.has_left(place):
                turns.hand_on(place)
            if watched.ended:
                self._decoding.discard(place)
                while self._decoding and watched.may_wait() and not (self._stop() or turns.has_left(place)):
                    turns.hand_on(place)
            return self._stop() or turns.has_left(place)

        thread = threading.get_ident()

        def abandon(hook: str) -> None:
            self.hearing.tell(self._log.change, number, self._failed(request, hangs(request.method, hook)))
            self._decoding.discard(place)
            turns.leave(place)
            self.hearing.abandon(thread)

        torch.set_num_threads(self._threads)
        watched = self._watched(number)
        turns.wait(place)
        try:
            planned = plan(request, prepared)
            pairing = Pairing(reference, reference.uid, reference_key(request, prepared))
            with abandoning(abandon):
                surroundings, raced = (self._runs, report, cancelled), len(self._lineup.entered())
                stored = store(prepared, request, planned, pairing, *surroundings, watcher=watched, raced=raced)
            ended = {"uid": stored.uid, "state": stored.status, "text": stored.text}
        except BaseException as error:  # a lane's thread receives no signal, so whatever it raises is its own
            ended = self._failed(request, stray(request.method, error))
        finally:
            self._decoding.discard(place)
            hung = turns.has_left(place)
            turns.leave(place)
        if not hung:
            self.hearing.tell(self._log.change, number, ended)

    def _watched(self, number: int) -> Watched:
        return Watched(number, len(self._prepared.prompt.ids), self.hearing.tell, self._log)

    def _failed(self, request: RunRequest, error: BaseException) -> dict[str, Any]:
        """What is said of a lane whose run ended with an error."""
        if isinstance(error, BudgetInfeasible):
            error = advice(request, sizes_of(request, self._prepared), error.smallest)
        if not isinstance(error, ValueError | TraceError):
            traceback.print_exception(error)
            return {"state": "failed", "message": f"{type(error).__name__}: {error}"}
        if isinstance(error, Shortage | TraceError | MethodFault):
            return {"state": "failed", "message": str(error)}
        return {"state": "cancelled" if self._stop() else REFUSED, "message": str(error)}

    # ------------------------------------------------------------------------------------- events, on the race's thread
    def _step(self, number: int, done: int, total: int) -> None:
        self._steps[number] = done
        self.audience.report("decode", sum(self._steps.values()), total * len(self._lineup.entered()))

    def _report_phase(self, number: int, phase: str, done: int, total: int) -> None:
        """A lane is not decoding yet."""
        self.audience.report(phase, done, total)
        if self._lanes[number].state != phase:
            self._log.change(number, {"state": phase})

    def _write(self) -> None:
        """Store the race with each change of a lane. A race whose full KV never ended is none."""
        if self._reference is not None:
            write(self._runs, self._info)


def _raise(error: Exception) -> None:
    raise error
