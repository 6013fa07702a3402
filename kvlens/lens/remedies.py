"""Changes of a method's parameters or budget, tried on runs that lost: which answers come back. Tried, never
guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlens.lens.answers import right
from kvlens.lens.diagnosis import Lost
from kvlens.lens.severity import severity
from kvlens.lens.verdict import verdict
from kvlens.models import find
from kvlens.models.device import settle
from kvlens.runs.carrying import carry_out_prepared
from kvlens.runs.memory import SHARE, attended_share
from kvlens.runs.preparing import check
from kvlens.runs.repeat import CannotRepeat, read_run, reload
from kvlens.runs.request import Report, RunRequest
from kvlens.shortage import Shortage
from kvlens.store.reader import TraceReader


@dataclass(frozen=True)
class Change:
    """name: 'budget', 'preset', or a parameter of the method."""

    name: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Change:
        """'budget=30%'. Raises ValueError with one sentence."""
        name, sign, value = (part.strip() for part in text.partition("="))
        if not (sign and name and value):
            raise ValueError(f"--try takes budget=SHARE, preset=NAME or parameter=value, not '{text}'.")
        return cls(name, value)

    def __str__(self) -> str:
        return f"{self.name}={self.value}"

    def applied(self, request: RunRequest) -> RunRequest:
        """A run's request with this changed and all else as it was, its other parameters included; a preset replaces
        them all. Raises ValueError with one sentence."""
        if self.name == "budget":
            share = attended_share(request.method, self.value, {})
            changed: dict[str, object] = {"budget": self.value}
            if share is not None:
                changed = {"budget": None, "overrides": {**request.overrides, SHARE: share}}
        elif self.name == "preset":
            changed = {"preset": self.value, "overrides": {}}
        else:
            changed = {"overrides": {**request.overrides, self.name: self.value}}
        return RunRequest.model_validate({**request.model_dump(), **changed, "against": True})


@dataclass(frozen=True)
class Tried:
    """A change on one run that lost."""

    lost: Lost
    uid: str | None
    """of the run with it, which is stored; None: it was refused"""
    restored: bool
    """the answer is the expected one; where that is not known, nothing that was asked for is lost any more"""
    refused: str | None = None
    """why it could not be run, one sentence"""


@dataclass(frozen=True)
class Remedy:
    """A change and what it came to on every run it was tried on."""

    change: Change
    tried: tuple[Tried, ...]

    @property
    def restored(self) -> int:
        return sum(trial.restored for trial in self.tried)

    @property
    def most(self) -> bool:
        """More than half of the losses are gone."""
        return 2 * self.restored > len(self.tried)


def attempt(
    runs_dir: Path,
    lost: Sequence[Lost],
    change: Change,
    report: Report,
    cancelled: Callable[[], bool],
    function: Callable[[Tried], None] = lambda loss: None,
) -> Remedy:
    """Run everything in `lost` again with `change`, each stored beside what is there and compared with full KV.

    A change that is refused for a run's size is a run that is not restored. Raises CannotRepeat for a run that does not
    say how it was made, Shortage, and ValueError for what no run of the method can have and when cancelled; what was
    run by then is stored."""
    trials = []
    for request in {loss.method: read_run(runs_dir, loss.uid).request for loss in lost}.values():
        check(change.applied(request))
    for loss in lost:
        past = read_run(runs_dir, loss.uid)
        _load_once(past.request)
        try:
            request = change.applied(past.request)
            check(request)
            uid, status, _ = carry_out_prepared(request, reload(past, report), runs_dir, report, cancelled)
        except ValueError as problem:
            if cancelled() or isinstance(problem, Shortage | CannotRepeat):
                raise
            trials.append(Tried(loss, None, False, str(problem)))
        else:
            if status != "completed":
                raise ValueError(f"cancelled; what was recorded is stored as {uid}.")
            trials.append(Tried(loss, uid, _restored(runs_dir, uid)))
        function(trials[-1])
    return Remedy(change, tuple(trials))


def _load_once(request: RunRequest) -> None:
    """The model of the run stays in memory for the next one."""
    from kvlens.engine.models import load

    if settle(request.device) == "cpu" and request.dtype == "float32" and find.find_model(request.model) is None:
        find.keep_model(request.model, load(request.model))


def _restored(runs_dir: Path, uid: str) -> bool:
    with TraceReader.open(runs_dir, uid) as reader:
        answer, results = right(reader), verdict(reader, missed=False)
        if answer is not None:
            return answer  # a wrong one is not back because full KV's turned out to be wrong as well
        return results is None or severity(reader, results).mild
