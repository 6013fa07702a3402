"""Steps, layers, KV heads, spans and kinds that a call names and the run lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvlens


def refusal(call: Callable[[], Any]) -> kvlens.RequestError:
    """Return the error that a call raises."""
    with pytest.raises(kvlens.RequestError) as error:
        call()
    return error.value


@pytest.mark.parametrize("table", ["decisions", "events", "transfers"])
@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("step", 999, -1),
        ("step", -2, -1),
        ("step", 0.5, -1),
        ("layer", 6, 0),
        ("layer", -1, 0),
        ("layer", "2", 0),
        ("kv_head", 2, 0),
        ("kv_head", float("nan"), 0),
    ],
)
def test_a_number_that_the_run_lacks_is_refused(
    lost: kvlens.Run, table: str, name: str, value: Any, least: int
) -> None:
    most = {"step": lost.reader.n_steps, "layer": lost.reader.n_layers, "kv_head": lost.reader.kv_heads}[name] - 1
    error = refusal(lambda: getattr(lost, table)(**{name: value}))
    assert error.code == "bad_value"
    assert {**error.values, "value": str(value)} == {"name": name, "value": str(value), "least": least, "most": most}


@pytest.mark.parametrize("span", [999, -1, "4", 1.5, True])
def test_a_span_that_the_run_lacks_is_refused(lost: kvlens.Run, span: Any) -> None:
    error = refusal(lambda: lost.readers(span))
    assert (error.code, error.values["name"], error.values["least"]) == ("bad_value", "span", 0)
    assert error.values["most"] == lost.spans()["span"].max()


@pytest.mark.parametrize(
    ("start", "stop", "name"),
    [(100, 200, "start"), (-1, None, "start"), (3, 3, "stop"), (3, 2, "stop"), (0, "9", "stop"), ("0", None, "start")],
)
def test_a_range_of_steps_that_the_run_lacks_is_refused(lost: kvlens.Run, start: Any, stop: Any, name: str) -> None:
    error = refusal(lambda: lost.heads(start, stop))
    assert (error.code, error.values["name"]) == ("bad_value", name)
    side, bound = ("most", lost.reader.n_steps - 1) if name == "start" else ("least", start + 1)
    assert error.values[side] == bound


def test_a_kind_that_no_decision_has_is_refused(lost: kvlens.Run) -> None:
    error = refusal(lambda: lost.decisions(kind="evictions"))
    assert (error.code, error.values["close"][0]) == ("unknown_kind", "eviction")
    assert "zoom" in error.values["known"]
    assert refusal(lambda: lost.decisions(kind=3)).code == "unknown_kind"  # type: ignore[arg-type]


def test_numbers_of_a_frame_are_taken(lost: kvlens.Run) -> None:
    assert len(lost.events(step=np.float64(1), layer=0.0))  # type: ignore[arg-type]
    assert len(lost.decisions(step=np.int64(1), kind="eviction"))  # type: ignore[arg-type]
    assert len(lost.events(step=-1))
    assert len(lost.heads(0, lost.reader.n_steps)) == len(lost.heads())
    assert lost.heads(0, 99).equals(lost.heads())
    assert len(lost.readers(lost.verdict.span))
