"""A run in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Only what the trace recorded: the steps and the copies as complete events ('X', microseconds since the run began), the
bytes each tier held at the end of a step as counters ('C'), and the names of the lanes ('M'). Copies of one direction
that overlap are spread over several lanes of that direction, because slices of one lane must lie inside each other or
apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import pandas as pd

from kvlens.intervals import lanes
from kvlens.store.reader import TraceReader

PREFILL, KEPT = "prefill", "prompt kept from an earlier run"
"""names of the slice in which the prompt was read"""

Event = dict[str, Any]
#: Process and thread numbers are labels only: one process, one thread per lane.
PROCESS, STEPS_LANE = 1, 1
#: Direction -> (number of its first lane, name). Up to 999 copies of a direction may be under way at once.
DIRECTION_LANES = {"h2d": (1_000, "h2d: host to device"), "d2h": (2_000, "d2h: device to host")}


def events(reader: TraceReader) -> Iterator[Event]:
    """All events of a run, the names of the lanes first."""
    copies, steps = reader.transfers(), reader.steps()
    lane = pd.Series(0, index=copies.index)
    for direction, part in copies.groupby("direction"):
        start, _ = DIRECTION_LANES.get(str(direction), (3_000, ""))
        lane[part.index] = start + lanes(part["start_us"].to_numpy(), part["end_us"].to_numpy())
    yield from _names(reader, copies["direction"], lane)
    yield from _steps(reader, steps)
    yield from _copies(copies, lane)
    for row in steps.to_dict("records"):
        held = {"on the device": int(row["resident_bytes"]), "in host memory": _whole(row["cold_bytes"])}
        yield {"ph": "C", "name": "KV bytes", "pid": PROCESS, "ts": int(row["t_us"]) + int(row["dur_us"]), "args": held}


def write(reader: TraceReader, out: BinaryIO) -> None:
    """The events as one JSON object; bytes since a run can have many."""
    about = reader.meta.pick(("model", "method", "stand_in", "preset", "device", "dtype", "link", "machine", "kvlens"))
    head = json.dumps({"displayTimeUnit": "ms", "otherData": {"run": reader.uid, **about}}, allow_nan=False)
    out.write(head[:-1].encode() + b', "traceEvents": [')
    separator = b"\n"
    for event in events(reader):
        out.write(separator + json.dumps(event, allow_nan=False).encode())
        separator = b",\n"
    out.write(b"\n]}\n")


def _names(reader: TraceReader, direction: pd.Series, lane: pd.Series) -> Iterator[Event]:
    yield _name("process_name", 0, f"kvlens run {reader.uid} ({reader.meta.method})")
    named = {STEPS_LANE: "engine steps"}
    for kind, start in ((kind, number) for kind, (number, _) in DIRECTION_LANES.items()):
        named[start] = DIRECTION_LANES[kind][1]
    for kind, number in zip(direction, lane, strict=True):
        start, text = DIRECTION_LANES.get(str(kind), (3_000, str(kind)))
        named.setdefault(int(number), f"{text} ({int(number) - start + 1})")
    for number, text in sorted(named.items()):
        yield _name("thread_name", number, text)
        yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": number, "args": {"sort_index": number}}


def _name(kind: str, lane: int, text: str) -> Event:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": lane, "args": {"name": text}}


def _slice(name: str, category: str, lane: int, start: int, end: int, args: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": PROCESS,
        "tid": lane,
        "ts": start,
        "dur": max(0, end - start),
        "args": {key: value for key, value in args.items() if value is not None},
    }


def _steps(reader: TraceReader, steps: pd.DataFrame) -> Iterator[Event]:
    prefill = reader.meta.prefill_us
    if prefill is not None:
        args = {"prompt_tokens": reader.meta.prompt_tokens, "peak_bytes": reader.meta.prefill_peak_bytes}
        name = KEPT if reader.meta.prompt_kept else PREFILL
        yield _slice(name, PREFILL, STEPS_LANE, 0, int(prefill), args)
    texts = reader.tokens().dropna(subset="step").set_index("step")["text"].to_dict()
    for row in steps.to_dict("records"):
        numbers = ("wait_us", "record_us", "resident_bytes", "peak_bytes", "h2d_bytes", "d2h_bytes")
        args = {"token": texts.get(row["step"])} | {name: _whole(row[name]) for name in numbers}
        yield _slice(
            f"step {row['step']}", "step", STEPS_LANE, int(row["t_us"]), int(row["t_us"]) + int(row["dur_us"]), args
        )


def _copies(copies: pd.DataFrame, lane: pd.Series) -> Iterator[Event]:
    for row, number in zip(copies.to_dict("records"), lane, strict=True):
        args = {
            "step": int(row["step"]),
            "layer": int(row["layer"]),
            "kv_head": _whole(row["kv_head"]),
            "span": _whole(row["span"]),
            "bytes": int(row["bytes"]),
            "wait_us": int(row["wait_us"]),
            "blocking": bool(row["blocking"]),
        }
        how = "blocking" if row["blocking"] else "background"
        yield _slice(
            str(row["cause"]), f"{row['direction']},{how}", int(number), int(row["start_us"]), int(row["end_us"]), args
        )


def _whole(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)
