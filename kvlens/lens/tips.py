"""Where a stored run's answer tips: the run is repeated with other budgets, or other values of one parameter, each a
stored run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens import methods
from kvlens.budget import BudgetInfeasible, percent_up
from kvlens.lens.knob import Knob, knob_in
from kvlens.lens.question import Question, unless
from kvlens.lens.storedtips import percent_of, right_of, stored_probes
from kvlens.lens.tipping import MOST, Probe, Tip, find_tip
from kvlens.lens.trylist import tries_in
from kvlens.lens.whatif import trials_of
from kvlens.runs.readings import keeping
from kvlens.runs.repeat import Past, read_run, reload
from kvlens.runs.request import BY_NAME, ModelSource, Report
from kvlens.store.reader import TraceReader

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference
    from kvlens.engine.engine import Result
    from kvlens.metaparts import Counterfactual
    from kvlens.runs.preparing import Prepared

BUDGET_STEP = 1.0
"""percent of full KV between a lost and a right budget at which a search ends"""
STEPS = 64
"""parts of the range of a parameter with fractions, one of which ends a search"""


class CannotTip(ValueError):
    """Why no tip can be searched for, in one sentence."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        """no_axis, not_numeric, bad_ends or has_holds"""


@dataclass(frozen=True)
class Axis:
    """What is varied."""

    name: str
    low: float
    high: float
    resolution: float
    own_value: float
    """value of the run itself"""
    whole: bool
    """whole numbers only"""
    knob: Knob | None
    """where the axis is the budget, or the parameter that stands for it: values are percent"""

    def rounded(self, value: float) -> float:
        """Return a value that can be run: a tenth of a percent, or a whole number."""
        if self.knob is not None:
            return round(value, 1)
        return float(round(value)) if self.whole else round(value, 6)

    def number(self, text: str) -> float | None:
        """Return the value that `text` writes; None for what is no value of the axis."""
        if self.knob is not None:
            return percent_of(text)
        try:
            return self.rounded(float(text))
        except ValueError:
            return None

    def text(self, value: float) -> str:
        """Return the value as a command takes it."""
        if self.knob is not None:
            return self.knob.value(value)
        return str(int(value)) if self.whole else f"{value:g}"


def axis_of(
    reader: TraceReader, parameter: str | None, low: float | None, high: float | None, resolution: float | None
) -> Axis:
    """Return what is varied, and between which ends.

    Args:
        parameter: of the method; None or "budget": the budget, or the share of tokens that the method attends.
        low, high: percent of full KV, or values of the parameter. None: the run's own value, and the far end of what
            the method can keep to; a parameter has no far end.
        resolution: None: 1 percent, 1, or a 64th of the range.

    Raises CannotTip.
    """
    knob = knob_in(reader)
    if parameter in (None, "budget") or (knob is not None and parameter == knob.name):
        if knob is None:
            raise CannotTip(
                "no_axis", f"{reader.meta.method} has no budget to vary: name a parameter and its two ends."
            )
        is_right = right_of(reader)
        ends = (knob.shares[0] if is_right is not False else knob.own, 100.0 if not is_right else knob.own)
        low, high = (end if value is None else value for value, end in zip((low, high), ends, strict=True))
        axis = Axis(knob.name, low, high, resolution or BUDGET_STEP, knob.own, False, knob)
    else:
        axis = _parameter_axis(reader, str(parameter), low, high, resolution)
    if not (math.isfinite(axis.low) and math.isfinite(axis.high)):
        raise CannotTip("bad_ends", "an end of the search is no finite number: name two numbers.")
    if axis.knob is None:
        axis = replace(axis, low=axis.rounded(axis.low), high=axis.rounded(axis.high))
    if not axis.low < axis.high:
        raise CannotTip("bad_ends", f"the lower end, {axis.low:g}, is not below the upper end, {axis.high:g}.")
    return axis


def _parameter_axis(
    reader: TraceReader, name: str, low: float | None, high: float | None, resolution: float | None
) -> Axis:
    method = methods.get(str(reader.meta.method))
    field = next((each for each in dataclasses.fields(method.Parameters) if each.name == name), None)
    value = reader.meta.config.get(name)
    if field is None or isinstance(value, bool) or not isinstance(value, int | float):
        names = [key for key, number in reader.meta.config.items() if type(number) in (int, float)]
        raise CannotTip("not_numeric", f"{name} is no number of {method.name}; it has {', '.join(names) or 'none'}.")
    if low is None and high is None:
        raise CannotTip("bad_ends", f"{name} is {value:g} in this run: say between which values to search.")
    start, end = float(value if low is None else low), float(value if high is None else high)
    whole = isinstance(field.default, int)
    return Axis(name, start, end, resolution or (1.0 if whole else (end - start) / STEPS), float(value), whole, None)


def tips(
    runs_dir: Path,
    uid: str,
    report: Report,
    cancelled: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda line: None,
    models: ModelSource = BY_NAME,
    parameter: str | None = None,
    low: float | None = None,
    high: float | None = None,
    resolution: float | None = None,
    most: int = MOST,
) -> Tip:
    """Search for the value at which a run's answer tips, and store every run that was made for it. A value whose repeat
    is stored is not run again.

    Arguments: see `axis_of` and `find_tip`. Raises CannotTip, and ValueError or TraceError with one sentence.
    """
    past = read_run(runs_dir, uid)
    if past.request.hold or past.request.drop:
        raise CannotTip("has_holds", f"run {uid} holds or drops tokens: search on the run that it repeats.")
    with TraceReader.open(runs_dir, uid) as reader:
        axis, own_right = axis_of(reader, parameter, low, high, resolution), right_of(reader)
    repeats = _Repeats(runs_dir, past, axis.name, report, cancelled, models)
    kept_probes = _kept_probes(runs_dir, uid, axis)
    count = 0

    def test(value: float) -> Probe:
        nonlocal count
        unless(cancelled)
        probe = kept_probes.get(value)
        if probe is None:
            say(f"Trying {axis.name} {axis.text(value)}.")
            probe = repeats.run(value, axis.text(value))
        count += 1
        report("search", count, most)
        return probe

    own_probes = [Probe(axis.own_value, own_right, uid)] if own_right is not None else []
    try:
        return find_tip(axis.name, test, axis.low, axis.high, axis.resolution, most, own_probes, axis.rounded)
    except BudgetInfeasible as refused:
        least = 100 * float(percent_up(refused.smallest / refused.full))
        sentence = f"a value is below what the method can hold: search from {least:.1f} % of full KV on."
        raise CannotTip("bad_ends", sentence) from refused


def _kept_probes(runs_dir: Path, uid: str, axis: Axis) -> dict[float, Probe]:
    """The values of the axis at which a repeat of the run is stored."""
    with contextlib.ExitStack() as stack:

        def read(run_uid: str) -> TraceReader:
            return stack.enter_context(TraceReader.open(runs_dir, run_uid))

        return stored_probes(axis.name, tries_in(runs_dir, uid), read, axis.number)


class _Repeats:
    """Repeats a run with one value changed. The model is loaded for the first."""

    def __init__(
        self, runs_dir: Path, past: Past, axis: str, report: Report, cancelled: Callable[[], bool], models: ModelSource
    ) -> None:
        self._runs, self._past, self._axis = runs_dir, past, axis
        self._report, self._cancelled, self._models = report, cancelled, models

    @cached_property
    def _ready(self) -> tuple[Prepared, Reference, Question]:
        """The model with the prompt, full KV's run, and what the run lost."""
        from kvlens.runs.preparing import plan
        from kvlens.runs.reference import obtain

        past, report = self._past, self._report
        prepared = replace(reload(past, report, self._models), kept=keeping([methods.get(past.request.method)]))
        reference = obtain(prepared, past.request, self._runs, report, self._cancelled)
        base = trials_of(prepared, plan(past.request, prepared), reference, past, report)
        return prepared, reference, Question.about(past, base, base, report)

    def run(self, value: float, text: str) -> Probe:
        """Store a repeat at a value, written as `text`, and return what came of it."""
        from kvlens.runs.preparing import Pairing, plan, reference_key
        from kvlens.runs.storing import store

        prepared, reference, question = self._ready
        past, changed = self._past, {self._axis: text}
        request = past.otherwise(changed).model_copy(update={"against": True, "forced_reference": False})
        planned = plan(request, prepared)
        pairing = Pairing(reference, reference.uid, reference_key(request, prepared), past.uid, changed=changed)
        repeated = replace(question, trials=trials_of(prepared, planned, reference, past, self._report), _losses={})

        def conclude(result: Result) -> Counterfactual:
            return repeated.answered(result, (), (), False, None)

        stored = store(prepared, request, planned, pairing, self._runs, self._report, self._cancelled, conclude)
        unless(self._cancelled)
        with TraceReader.open(self._runs, stored.uid) as repeat:
            judged = right_of(repeat)
            assert judged is not None, "a repeat is compared with full KV"
            return Probe(value, judged, stored.uid)
