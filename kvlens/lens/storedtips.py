"""What the stored repeats of a run tell of where its answer tips. No model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvlens.budget import Budget
from kvlens.lens.answers import full_right, right
from kvlens.lens.knob import knob_in
from kvlens.lens.tipping import Probe, Tip
from kvlens.lens.tries import Try
from kvlens.store.reader import TraceReader


def right_of(reader: TraceReader) -> bool | None:
    """Return whether a run's answer is right, where full KV's is; else whether its output is full KV's. None: neither
    is known."""
    if full_right(reader) and (judged := right(reader)) is not None:
        return judged
    reference, output = reader.meta.reference_output, reader.meta.output_text
    return None if reference is None or reader.meta.forced else output == reference


def stored_probes(
    name: str, trials: Iterable[Try], read: Callable[[str], TraceReader], number: Callable[[str], float | None]
) -> dict[float, Probe]:
    """Return value -> probe of the repeats that differ from their run in one axis alone; the newest of each value.

    Args:
        name: of the axis, a parameter or "budget".
        trials: of the run (kvlens.lens.tries), newest first.
        read: opens a run.
        number: the value of what a repeat was asked for; None where it is no number.
    """
    probes: dict[float, Probe] = {}
    for trial in trials:
        text = trial.changed.get(name)
        if trial.holds or trial.drops or len(trial.changed) != 1 or text is None:
            continue
        value = number(text)
        if value is not None and value not in probes and (judged := right_of(read(trial.uid))) is not None:
            probes[value] = Probe(value, judged, trial.uid)
    return probes


def stored_tip(reader: TraceReader, trials: Iterable[Try], read: Callable[[str], TraceReader]) -> Tip:
    """Return what the stored repeats of a run at other budgets tell of where it tips. trials, read: see
    `stored_probes`."""
    knob = knob_in(reader)
    if knob is None:
        return Tip("budget", ())
    probes = stored_probes(knob.name, trials, read, percent_of)
    if probes and (own_right := right_of(reader)) is not None:
        probes[knob.own] = Probe(knob.own, own_right, reader.uid)
    return Tip(knob.name, tuple(probes[value] for value in sorted(probes)))


def percent_of(text: str) -> float | None:
    """Return a budget's share of full KV in percent; None for a number of bytes or tokens, and for no budget."""
    try:
        budget = Budget.parse(text)
    except ValueError:
        return None
    return round(100 * budget.amount, 1) if budget.unit == "share" else None
