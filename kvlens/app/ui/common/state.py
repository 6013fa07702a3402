"""The one selection all pages share - run, step, layer, query head, span, metric - and its readable URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

#: URL parameters in the order in which they are written.
FIELDS = ("run", "step", "layer", "head", "span", "metric")


class RunShape(Protocol):
    """The sizes a selection is clamped to; a TraceReader satisfies it."""

    @property
    def n_steps(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def q_heads(self) -> int: ...


@dataclass(frozen=True)
class Selection:
    """What is looked at. None: not chosen yet; `clamp` fills in what a page needs."""

    run: str | None = None
    step: int | None = None
    layer: int | None = None
    head: int | None = None
    """query head"""
    span: int | None = None
    metric: str | None = None

    def query(self) -> dict[str, str]:
        """URL parameters, chosen fields only."""
        return {name: str(value) for name in FIELDS if (value := getattr(self, name)) is not None}

    def merged(self, change: Mapping[str, object]) -> Selection:
        """Return this selection with the known fields of `change` put over it; None clears a field."""
        return replace(self, **{name: change[name] for name in FIELDS if name in change})  # type: ignore[arg-type]


def parse(params: Mapping[str, str]) -> tuple[Selection, list[str]]:
    """Selection from URL parameters, and one phrase per parameter that could not be read."""
    values: dict[str, object] = {}
    problems: list[str] = []
    for name in FIELDS:
        raw = params.get(name)
        if raw is None or raw == "":
            continue
        if name in ("run", "metric"):
            values[name] = raw
        elif raw.isascii() and raw.isdigit() and len(raw) <= 9:
            values[name] = int(raw)
        else:
            problems.append(f"{name} {raw[:40]!r} is not a whole number; ignored")
    return Selection().merged(values), problems


def clamp(
    selection: Selection, shape: RunShape, metrics: list[str], spans: set[int], opening: Selection
) -> tuple[Selection, list[str]]:
    """Selection brought inside the run, defaults filled in, and one phrase per value that had to be changed.

    `metrics`: names recorded in this run. `spans`: ids of its spans. `opening`: what a page opens with; its step, layer
    and head are set, its span is selected where nothing but the run (and perhaps the metric) was chosen."""
    problems: list[str] = []
    changed: dict[str, object] = {}
    if selection.step is selection.layer is selection.head is selection.span is None:
        changed["span"] = opening.span
    for name, size in (("step", shape.n_steps), ("layer", shape.n_layers), ("head", shape.q_heads)):
        value = getattr(selection, name)
        last = max(0, size - 1)
        if value is None:
            changed[name] = getattr(opening, name)
        elif value > last:
            problems.append(f"{name} {value} beyond {last}; showing {last}")
            changed[name] = last
    if selection.span is not None and selection.span not in spans:
        problems.append(f"span {selection.span} is not in this run; none selected")
        changed["span"] = None
    if selection.metric is not None and selection.metric not in metrics:
        problems.append(f"metric {selection.metric[:40]!r} was not recorded in this run; showing {opening.metric}")
    if selection.metric not in metrics:
        changed["metric"] = opening.metric
    return selection.merged(changed), problems


def from_player(value: object) -> dict[str, object]:
    """The fields of a player's commit that are well formed; the component's output is never trusted further.

    A commit is {step, layer, head, span, metric}; span may be None."""
    if not isinstance(value, Mapping):
        return {}
    change: dict[str, object] = {}
    for name in ("step", "layer", "head", "span"):
        item = value.get(name)
        if isinstance(item, (int, float)) and not isinstance(item, bool) and item >= 0 and int(item) == item:
            change[name] = int(item)
        elif name == "span" and name in value and item is None:
            change[name] = None
    if isinstance(metric := value.get("metric"), str):
        change["metric"] = metric
    return change


def parse_steps(text: str | None, last: int) -> tuple[int, int]:
    """'a-b' as a range inside 0..last; anything else is the whole run."""
    first_item, _, second = (text or "").partition("-")
    if not (first_item.isdigit() and second.isdigit() and len(first_item) < 10 and len(second) < 10):
        return 0, last
    start, end = min(int(first_item), last), min(int(second), last)
    return (start, end) if start <= end else (0, last)
