"""Where a stored run's answer tips: the run is repeated with other budgets, or other values of one parameter, each a
stored run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens import methods
from kvlens.lens.knob import Knob, knob_in
from kvlens.lens.question import Question, unless
from kvlens.lens.severity import full_right, right
from kvlens.lens.tipping import MOST, Probe, Tip, find_tip
from kvlens.lens.tries import Try
from kvlens.lens.whatif import trials_of
from kvlens.memory.budget import Budget, BudgetInfeasible, percent_up
from kvlens.runs.readings import keeping
from kvlens.runs.repeat import read_run, reload
from kvlens.runs.request import BY_NAME, ModelSource, Report
from kvlens.store.reader import TraceReader

if TYPE_CHECKING:
    from kvlens.engine.engine import Result
    from kvlens.meta import Counterfactual

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


def right_of(reader: TraceReader) -> bool | None:
    """Return whether a run's answer is right, where full KV's is; else whether its output is full KV's. None: neither
    is known."""
    if full_right(reader) and (judged := right(reader)) is not None:
        return judged
    reference, output = reader.meta.reference_output, reader.meta.output_text
    return None if reference is None or reader.meta.forced else output == reference


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
    """Search for the value at which a run's answer tips, and store every run that was made for it.

    Arguments: see `axis_of` and `find_tip`. Raises CannotTip, and ValueError or TraceError with one sentence.
    """
    from kvlens.runs.preparing import Pairing, plan, reference_key
    from kvlens.runs.reference import obtain
    from kvlens.runs.storing import store

    past = read_run(runs_dir, uid)
    if past.request.hold or past.request.drop:
        raise CannotTip("has_holds", f"run {uid} holds or drops tokens: search on the run that it repeats.")
    with TraceReader.open(runs_dir, uid) as reader:
        axis, own_right = axis_of(reader, parameter, low, high, resolution), right_of(reader)
    prepared = replace(reload(past, report, models), kept=keeping([methods.get(past.request.method)]))
    reference = obtain(prepared, past.request, runs_dir, report, cancelled)
    base = trials_of(prepared, plan(past.request, prepared), reference, past, report)
    question = Question.about(past, base, base, report)
    count = 0

    def test(value: float) -> Probe:
        nonlocal count
        unless(cancelled)
        say(f"Trying {axis.name} {axis.text(value)}.")
        changed = {axis.name: axis.text(value)}
        request = past.otherwise(changed).model_copy(update={"against": True, "forced_reference": False})
        planned = plan(request, prepared)
        pairing = Pairing(reference, reference.uid, reference_key(request, prepared), uid, changed=changed)
        repeated = replace(question, trials=trials_of(prepared, planned, reference, past, report), _losses={})

        def conclude(result: Result) -> Counterfactual:
            return repeated.answered(result, (), (), False, None)

        stored = store(prepared, request, planned, pairing, runs_dir, report, cancelled, conclude)
        unless(cancelled)
        count += 1
        report("search", count, most)
        with TraceReader.open(runs_dir, stored.uid) as repeat:
            judged = right_of(repeat)
            assert judged is not None, "a repeat is compared with full KV"
            return Probe(value, judged, stored.uid)

    stored_probes = [Probe(axis.own_value, own_right, uid)] if own_right is not None else []
    try:
        return find_tip(axis.name, test, axis.low, axis.high, axis.resolution, most, stored_probes, axis.rounded)
    except BudgetInfeasible as refused:
        least = 100 * float(percent_up(refused.smallest / refused.full))
        sentence = f"a value is below what the method can hold: search from {least:.1f} % of full KV on."
        raise CannotTip("bad_ends", sentence) from refused


def stored_tip(reader: TraceReader, trials: Iterable[Try], read: Callable[[str], TraceReader]) -> Tip:
    """Return what the stored repeats of a run at other budgets tell of where it tips.

    Args:
        trials: of the run (kvlens.lens.tries).
        read: opens a run.
    """
    knob = knob_in(reader)
    if knob is None:
        return Tip("budget", ())
    probes = {}
    for trial in trials:
        value = trial.changed.get(knob.name)
        if trial.holds or trial.drops or len(trial.changed) != 1 or value is None:
            continue
        share, judged = _percent(value), right_of(read(trial.uid))
        if share is not None and judged is not None:
            probes[share] = Probe(share, judged, trial.uid)
    if probes and (own_right := right_of(reader)) is not None:
        probes[knob.own] = Probe(knob.own, own_right, reader.uid)
    return Tip(knob.name, tuple(probes[value] for value in sorted(probes)))


def _percent(text: str) -> float | None:
    try:
        budget = Budget.parse(text)
    except ValueError:
        return None
    return round(100 * budget.amount, 1) if budget.unit == "share" else None
