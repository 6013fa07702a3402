"""Parts of a stored run that a call names by number or kind: each is checked against the parts that the run has."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

from kvlens.api.errors import RequestError, unknown_name

if TYPE_CHECKING:
    from kvlens.store.reader import TraceReader

Place = int | None
"""a step, layer, KV head or span; None: not named"""


def take_places(reader: TraceReader, step: Any, layer: Any, kv_head: Any) -> tuple[Place, Place, Place]:
    """Return a step, layer and KV head as int; step -1 is the end of prefill. Raises RequestError `bad_value` for one
    that the run lacks."""
    return (
        _take_number("step", step, -1, reader.n_steps - 1),
        _take_number("layer", layer, 0, reader.n_layers - 1),
        _take_number("kv_head", kv_head, 0, reader.kv_heads - 1),
    )


def take_steps(reader: TraceReader, start: Any, stop: Any) -> tuple[int, Place]:
    """Return the steps [start, stop) as int; a stop behind the last step is the run's end, and so is None. Raises
    RequestError `bad_value` for a start that the run lacks and a stop that is not behind it."""
    number = _take_number("start", start, 0, max(0, reader.n_steps - 1)) or 0
    if stop is None:
        return number, None
    if not _is_whole(stop) or stop <= number:
        sentence = f"stop={stop!r} is no whole number above start={number}: pass the step behind the last one."
        raise RequestError("bad_value", sentence, name="stop", value=stop, least=number + 1)
    return number, min(int(stop), reader.n_steps)


def take_span(reader: TraceReader, span: Any) -> Place:
    """Return a span as int. Raises RequestError `bad_value` for a span that the run lacks."""
    spans = [row.span for row in reader.span_rows()]
    least, most = min(spans, default=0), max(spans, default=-1)
    number = _take_number("span", span, least, most)
    if number is not None and number not in spans:
        raise _absent("span", span, least, most)
    return number


def check_kind(kind: Any) -> None:
    """Raise RequestError `unknown_kind` for a kind that no decision has. None: not named."""
    from kvlens.decisions import DECISION_KINDS

    if kind is not None and kind not in DECISION_KINDS:
        raise unknown_name("unknown_kind", "the kind", kind, list(DECISION_KINDS))


def _take_number(name: str, value: Any, least: int, most: int) -> Place:
    """Return a number as int, also one of numpy. Raises RequestError `bad_value` unless it is whole and in [least,
    most]."""
    if value is None:
        return None
    if _is_whole(value) and least <= value <= most:
        return int(value)
    raise _absent(name, value, least, most)


def _is_whole(value: Any) -> bool:
    """Return True for a finite whole number, also one of numpy."""
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value % 1 == 0)


def _absent(name: str, value: Any, least: int, most: int) -> RequestError:
    """Return the error for a number that names no part of the run."""
    numbers = f"a whole number from {least} to {most}" if least <= most else "no number"
    sentence = f"{name}={value!r} is not in the run: its {name}= takes {numbers}."
    return RequestError("bad_value", sentence, name=name, value=value, least=least, most=most)
