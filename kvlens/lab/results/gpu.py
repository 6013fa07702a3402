"""The result file: rows of each part, provenance, and atomic replacement. Plain dataclasses and JSON, so that a machine
that has torch alone can measure; `schema.py` checks a file where it is read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvlens.lab.results.offloadrow import OffloadRow
from kvlens.refusal import Refusal

FORMAT = 2


@dataclass(frozen=True)
class CeilingRow:
    """What the device or the bus can do. amount: bytes (reads and writes both) or floating-point operations of one
    call."""

    name: str
    setting: str
    seconds: float
    amount: float
    unit: Literal["B/s", "FLOP/s"]
    rate: float
    kind: Literal["ceiling"] = "ceiling"


@dataclass(frozen=True)
class CheckRow:
    """A kernel's result against float64 (relative error), or something that has to be exact (tolerance 0)."""

    name: str
    error: float
    tolerance: float
    passed: bool | None
    """None: not compared, since something explains any difference; neither passed nor failed"""
    kind: Literal["check"] = "check"


@dataclass(frozen=True)
class KernelRow:
    """One kernel at one setting. `bytes`: what it has to move at least; `ceiling`: name and rate of what limits it;
    `share`: of that, None where the ceiling was not measured; `aim`: the share asked for, where one is."""

    kernel: str
    setting: str
    seconds: float | None
    bytes: float
    rate: float | None
    ceiling: str
    share: float | None
    aim: float | None = None
    reason: str | None = None
    """why there is no figure"""
    kind: Literal["kernel"] = "kernel"


Scope = Literal["decode", "compiled"]
"""a whole step, the Hugging Face modules through kvlens/lab/gpu/static; the same, compiled whole"""


Way = Literal["modules", "fused", "fused, overlapped", "fused, recalls led by the host"]
"""how the layers around the attention are computed: by the modules of transformers; by few fused kernels
(kvlens/lab/gpu/static/llama.py); by the same, each launched while the one before ends; by the same without a graph,
since the host waits for every plan and copies page by page (kvlens/lab/gpu/static/host_moves.py). Overlapped launches
were slower on an H200, and only its file has them"""


RateSource = Literal["recorded", "papers", "set", "none"]
"""where replayed rates come from: runs of ours; the papers, and ours where they give none; set, to be swept; the method
has none"""


@dataclass(frozen=True)
class StepRow:
    """One method at one context and batch. Times in seconds; None where it was not run, with the reason."""

    method: str
    context: int
    batch: int
    graph: bool
    steps: int
    median: float | None
    p95: float | None
    floor: float | None
    over_floor: float | None
    """achieved / floor"""
    stall: float | None
    """median with the recall minus median without, where wishes are replayed"""
    device_bytes: int | None
    """by arithmetic, as host_bytes; None where a method does not say what its step moves, so that it has no floor"""
    host_bytes: int | None
    resident_bytes: int
    peak_bytes: int | None
    note: str
    reason: str | None = None
    rates: dict[str, float] = field(default_factory=dict)
    """those that are replayed"""
    rates_from: RateSource = "none"
    scope: Scope = "decode"
    loop: float | None = None
    """mean of whole decode steps with the host's part between them: decisions, sampling, tokens that leave the window
    every few steps"""
    counted_bytes: int | None = None
    """over the bus per step, by the run's own counter"""
    kernels: str = "triton"
    """what attends: k1, or PyTorch"""
    way: Way = "modules"
    kind: Literal["step"] = "step"


@dataclass(frozen=True)
class HeadlineRow:
    """A paper's ratio beside ours and the floor's, both at the same replayed rates; None where a cell was not measured
    at them."""

    name: str
    quantity: str
    paper: float
    ours: float | None
    floor: float
    where: str
    reachable: bool
    """two implementations at their floors would show the paper's ratio at this shape"""
    rates_from: RateSource = "none"
    kind: Literal["headline"] = "headline"


@dataclass(frozen=True)
class RecordingRow:
    """The same step with more or less of it recorded, in a graph or launched one by one."""

    recording: str
    graph: bool
    context: int
    batch: int
    median: float
    p95: float
    added: float | None
    """share of the step without recording, same launch"""
    method: str
    kind: Literal["recording"] = "recording"


@dataclass(frozen=True)
class LedgerRow:
    """Bytes by our own count beside what the profiler saw."""

    name: str
    counted: int
    seen: int
    events: int
    how: str
    passed: bool
    kind: Literal["ledger"] = "ledger"


Row = CeilingRow | CheckRow | KernelRow | StepRow | HeadlineRow | RecordingRow | LedgerRow | OffloadRow


@dataclass(frozen=True)
class Entry:
    """One part. `sources`: digest of the code that measured it; a done entry with the digest of today is not measured
    again."""

    part: str
    status: Literal["done", "failed"]
    sources: str
    commit: str
    date: str
    seconds: float
    rows: Sequence[Row]
    reason: str | None = None
    suggestion: str | None = None
    lacking: bool = False
    """it could not be measured for want of something that may be there the next time: its place in the order stays"""


@dataclass(frozen=True)
class Result:
    """A whole file. `note`: what is true of every figure in it."""

    format: int
    dry_run: bool
    device: dict[str, Any]
    versions: dict[str, str]
    note: str
    updated: str
    missing: Sequence[str]
    entries: dict[str, Entry]


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def begin(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """What is in `path` for the same device and versions, else an empty result with `header`."""
    fresh = {"format": FORMAT, **header, "updated": today(), "missing": [], "entries": {}}
    if not path.is_file():
        return fresh
    try:
        message = json.loads(path.read_text(encoding="utf-8"))
        same = (
            all(_same(message[name], header[name]) for name in ("dry_run", "device", "versions"))
            and message["format"] == FORMAT
        )
        return {**fresh, "entries": message["entries"]} if same else fresh
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Refusal(
            f"'{path.name}' is not a result of this benchmark: name another folder, or delete it.", code="no_gpu_result"
        ) from None


def _same(results: Any, target: Any) -> bool:
    """Clocks and free memory change between two calls on one device; the rest has to be equal."""
    if isinstance(target, dict):
        return all(results.get(name) == value for name, value in target.items() if name not in ("clocks", "free_bytes"))
    return bool(results == target)


def save(path: Path, result: dict[str, Any]) -> None:
    """Replace the file in one step, so that an interruption leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def put(result: dict[str, Any], entry: Entry) -> None:
    result["entries"][entry.part] = asdict(entry)
    result["updated"] = today()


def rows(result: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """All rows of a kind, of whatever part, in the order they were measured."""
    return [row for entry in result["entries"].values() for row in entry["rows"] if row["kind"] == kind]


def ceiling(result: dict[str, Any], name: str) -> float | None:
    """The best measured rate of that name."""
    return max((row["rate"] for row in rows(result, "ceiling") if row["name"] == name), default=None)
