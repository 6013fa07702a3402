"""What is set differently in any number of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvlens.budget import of_run
from kvlens.metaparts import Held
from kvlens.store.reader import TraceReader

#: What is compared of the configuration, in this order; the method's own parameters follow.
SETTINGS = (
    "model",
    "model_fingerprint",
    "method",
    "preset",
    "budget",
    "budget_bytes",
    "device",
    "dtype",
    "seed",
    "temperature",
    "top_p",
    "max_new",
    "task",
    "forced",
    "parent",
    "coverage",
    "oracle",
    "trace_level",
    "kvlens",
    "torch",
    "transformers",
    "kernels",
    "link",
    "machine",
    "started",
)
CIRCUMSTANCES = ("kvlens", "torch", "transformers", "kernels", "link", "machine", "started")
"""with what and when a run was carried out, which nobody asked for"""
KINDS = ("differs", "some methods only", "circumstances", "same")
_WORDS = {
    "model_fingerprint": "model's fingerprint",
    "budget_bytes": "budget (bytes)",
    "dtype": "number format",
    "top_p": "top-p",
    "max_new": "new tokens at most",
    "parent": "repeats the run",
    "oracle every": "full attention recorded every n-th step",
    "oracle layers": "full attention recorded in layers",
    "trace_level": "trace level",
    "kernels": "attention by",
    "machine threads": "threads",
}
ABSENT = "–"
"""what a setting that a run does not have is shown as"""
_PARAMETER = "parameter "
_MISSING = object()


def settings(reader: TraceReader) -> dict[str, Any]:
    """A run's settings by name; the method's parameters are called 'parameter NAME'."""
    meta = reader.meta
    values_by_name: dict[str, Any] = {}
    for name, value in meta.pick(SETTINGS).items():
        values_by_name |= (
            _flat(value, f"{name} ") if isinstance(value, dict) else {} if value is None else {name: value}
        )
    values_by_name |= {} if meta.asked_new is None else {"max_new": meta.asked_new}
    values_by_name |= {"budget": of_run(meta.budget, meta.budget_bytes)} if meta.budget is not None else {}
    values_by_name |= {"held ranges": "; ".join(map(_held, meta.hold))} if meta.hold else {}
    values_by_name |= {"dropped ranges": "; ".join(map(_held, meta.drop))} if meta.drop else {}
    return values_by_name | {f"{_PARAMETER}{name}": value for name, value in _flat(meta.config).items()}


def config_difference(runs: Mapping[str, TraceReader]) -> pd.DataFrame:
    """Every setting of any of the runs as text: setting, one column per run under its name, kind. In this order of
    kinds: 'differs', 'some methods only' (a parameter that runs of other methods do not have, alike in those that
    do), 'circumstances' (one of CIRCUMSTANCES that differs), 'same'."""
    every = {name: settings(reader) for name, reader in runs.items()}
    rows = [
        {"setting": name}
        | {run: _text(config.get(name)) for run, config in every.items()}
        | {"kind": _kind(name, list(every.values()))}
        for name in sorted(dict.fromkeys(name for config in every.values() for name in config), key=_place)
    ]
    frame = pd.DataFrame(rows, columns=["setting", *runs, "kind"])
    return frame.sort_values("kind", key=lambda kinds: kinds.map(KINDS.index), kind="stable", ignore_index=True)


def _held(held: Held) -> str:
    """'span 5, tokens 64-79, for L0-29 KV0+1+2, from step 2 on': all of it, so that what differs reads differently."""
    layers: dict[int, list[int]] = {}
    for layer, head in sorted(held.heads):
        layers.setdefault(layer, []).append(head)
    runs: list[tuple[int, int, list[int]]] = []
    for layer, heads in layers.items():
        if runs and runs[-1][1:] == (layer - 1, heads):
            runs[-1] = runs[-1][0], layer, heads
        else:
            runs.append((layer, layer, heads))
    names = (
        f"L{first_layer}{f'-{last}' if last > first_layer else ''} KV{'+'.join(map(str, heads))}"
        for first_layer, last, heads in runs
    )
    where = f"span {held.span}, tokens {held.tok_start}-{held.tok_end - 1}, for {', '.join(names)}"
    return f"{where}, from step {held.from_step} on"


def _place(name: str) -> int:
    """Settings in the order of SETTINGS, then held and dropped ranges, then parameters as they come."""
    return SETTINGS.index(first_word) if (first_word := name.partition(" ")[0]) in SETTINGS else len(SETTINGS)


def _kind(name: str, every: Sequence[dict[str, Any]]) -> str:
    values = [config.get(name, _MISSING) for config in every]
    having = [value for value in values if value is not _MISSING]
    alike = all(value == having[0] for value in having)
    if alike and len(having) == len(values):
        return "same"
    if name.partition(" ")[0] in CIRCUMSTANCES:
        return "circumstances"
    return "some methods only" if alike and name.startswith(_PARAMETER) else "differs"


def setting_words(name: str) -> str:
    """What a page calls a setting; a method's parameter by the name that is asked for."""
    return name if name.startswith(_PARAMETER) else _WORDS.get(name, name.replace("_", " "))


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _text(value: Any) -> str:
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
