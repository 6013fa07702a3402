"""The benchmark as a whole: which parts there are, which are still to be measured, and what happens when one fails."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kvlens import __version__
from kvlens.lab.gpu import decode, headlines, matvec_times
from kvlens.lab.gpu.device import DryDevice, pick, slug
from kvlens.lab.gpu.failures import Lacking, sentence
from kvlens.lab.gpu.order import NAMES, all_parts
from kvlens.lab.gpu.part import HERE, Bench, Part
from kvlens.lab.gpu.rates import MISSING, read
from kvlens.lab.results.gpu import (
    CheckRow,
    Entry,
    KernelRow,
    LedgerRow,
    RecordingRow,
    Row,
    StepRow,
    begin,
    put,
    save,
    today,
)
from kvlens.lab.results.offloadrow import OffloadRow
from kvlens.models.find import SMOLLM2

NOTE = f"Llama-3.1-8B's shape. Decode: {decode.LABEL}."
CONTEXTS, BATCHES = (8192, 32768, 131072), (1, 8)
DRY_CONTEXTS, DRY_BATCHES = (256, 512), (1, 2)
UNENDED = "it was begun and did not end"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What to measure. `parts`: beginnings of names, none: all; with `whole_names` names, in the order in which they
    are measured. `minutes`: no part is begun after that."""

    out: Path
    minutes: float = 10.0
    parts: Sequence[str] = ()
    dry_run: bool = False
    contexts: Sequence[int] = ()
    batches: Sequence[int] = ()
    model: str = SMOLLM2
    """whose KV is offloaded; a dry run takes the toy"""
    whole_names: bool = False

    def place_of(self, name: str) -> int | None:
        """Return where a part of this name stands in the order that was asked for; None: it is not asked for."""
        if self.whole_names:
            return self.parts.index(name) if name in self.parts else None
        return 0 if not self.parts or name.startswith(tuple(self.parts)) else None

    def __post_init__(self) -> None:
        for name in self.parts:
            if not any(name.startswith(known_values) for known_values in NAMES):
                raise ValueError(f"unknown part '{name}'; known: {', '.join(NAMES)}.")
        if self.minutes <= 0:
            raise ValueError("--minutes must be above 0.")
        if any(context < 256 or context & (context - 1) for context in self.contexts):
            raise ValueError("contexts must be powers of two, 256 at least.")
        if any(batch < 1 for batch in self.batches):
            raise ValueError("batches must be at least 1.")


def numbers(text: str) -> tuple[int, ...]:
    """'8192,32768' -> (8192, 32768); nothing -> (). Raises ValueError with one sentence."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"'{text}' is not a list of whole numbers like 8192,32768.") from None


def part_names(text: str) -> tuple[tuple[str, ...], bool]:
    """Return `parts` and `whole_names` of a request: beginnings of names are separated by commas, whole names, which
    may have commas in them, by semicolons."""
    whole = ";" in text
    return tuple(part.strip() for part in text.split(";" if whole else ",") if part.strip()), whole


def measure(request: Request, say: Say, device: DryDevice | None = None) -> Path:
    """Measure what is missing and return the file. Raises ValueError where there is no device to measure."""
    device = device or pick(request.dry_run)
    contexts = request.contexts or (DRY_CONTEXTS if device.dry else CONTEXTS)
    batches = request.batches or (DRY_BATCHES if device.dry else BATCHES)
    facts = device.facts()
    path = request.out / f"gpu-{slug(facts['name'])}.json"
    versions = {"kvlens": __version__, **device.versions()}
    rates = read()
    if not rates.recorded:
        say(MISSING)
    header = {"dry_run": device.dry, "device": facts, "versions": versions, "note": f"{NOTE} {rates.describe()}"}
    result = begin(path, header)
    runs, until = request.out / f"{path.stem}-runs", time.monotonic() + 60 * request.minutes
    matvec_times.adopt(result)
    bench = Bench(device, contexts, batches, result, rates, offloaded=request.model, runs=runs, until=until)
    places = {part.name: request.place_of(part.name) for part in all_parts(contexts, batches)}
    parts = [part for part in all_parts(contexts, batches) if places[part.name] is not None]
    missing = [part.name for part in parts if not _is_done(bench, part)]
    # of those asked for alike what failed before comes last: a part which breaks the device does not keep the others
    # from being measured
    order = sorted(
        (part for part in parts if not _is_done(bench, part)),
        key=lambda p: (_arithmetic(p), places[p.name], _broke(result, p)),
    )
    wording = False
    for part in order:
        if bench.over and not _arithmetic(part):
            if not wording:
                remaining = [name for name in missing if name != headlines.PART.name]
                say(f"{request.minutes:g} minutes are over; run again for: {', '.join(remaining)}.")
                wording = True
            continue
        say(f"{part.name} ...")
        previous = result["entries"].get(part.name)
        entry, broken = _measure_part(bench, part, path)
        put(result, entry)
        if entry.lacking and not entry.rows and _whole(previous, part):
            result["entries"][part.name] = previous  # another model's: not given up for one that is not here
        if not entry.lacking:
            missing.remove(part.name)
        result["missing"] = missing
        save(path, result)
        say(f"{part.name}: {entry.status} in {entry.seconds:.0f} s" + (f". {entry.reason}" if entry.reason else ""))
        for line in _lacks(entry.rows):
            say(f"  {line}")
        if broken:
            say("The device is in an error state; run again for the other parts.")
            break
    return path


def _arithmetic(part: Part) -> bool:
    """On the other parts: it is made anew at the end of every call, and takes no time."""
    return part is headlines.PART


def _broke(result: dict[str, Any], part: Part) -> bool:
    """It was begun before, and not for want of something was it left."""
    entry = result["entries"].get(part.name)
    return entry is not None and not entry.get("lacking", False)


def _whole(entry: dict[str, Any] | None, part: Part) -> bool:
    """It was measured to its end by the code of today."""
    return bool(entry and entry["status"] == "done" and entry["sources"] == part.sources)


def _is_done(bench: Bench, part: Part) -> bool:
    """It is whole, and all of it is of what this call asks for."""
    entry = bench.result["entries"].get(part.name)
    return _whole(entry, part) and len(bench.held(part)) == len(entry["rows"]) and not _arithmetic(part)


def _measure_part(bench: Bench, part: Part, path: Path) -> tuple[Entry, bool]:
    """The part's entry, and whether the device can be used no more. Should the process end in the midst, the file says
    so, has the rows up to there, and the part comes last the next time."""
    start_time, broken, lacking = time.monotonic(), False, False
    rows: list[Row] = []
    reason = suggestion = None

    def entry(status: Literal["done", "failed"], rows: Sequence[Any]) -> Entry:
        took = time.monotonic() - start_time
        return Entry(part.name, status, part.sources, commit(), today(), took, rows, reason, suggestion, lacking)

    reason = UNENDED
    _keep(bench, path, entry("failed", bench.held(part)))
    try:
        for row in part.run(bench):  # what came before a failure is kept
            rows.append(row)
            _keep(bench, path, entry("failed", rows))
        reason = _missing(rows[0]) if rows and all(_missing(row) for row in rows) else None
    except Exception as problem:  # one part's failure is its own
        reason, suggestion = sentence(problem, part.smaller)
        lacking, broken = isinstance(problem, Lacking), not bench.device.alive()
    if not broken:
        bench.device.release()
    return entry("done" if reason is None else "failed", rows), broken


def _keep(bench: Bench, path: Path, entry: Entry) -> None:
    put(bench.result, entry)
    save(path, bench.result)


def _missing(row: Row) -> str | None:
    """Why a row has no figure; None: it has one."""
    return row.reason if isinstance(row, StepRow | KernelRow | OffloadRow) else None


def _lacks(rows: Sequence[Row]) -> list[str]:
    """Figures that could not be had, each reason once, and checks that failed."""
    mapping: dict[str, list[str]] = {}
    for row in rows:
        reason, name = _missing(row), _name(row)
        if reason is not None:
            mapping.setdefault(reason, []).append(name)
        elif isinstance(row, CheckRow | LedgerRow | OffloadRow) and row.passed is False:
            mapping.setdefault("FAILED", []).append(name)
    return [f"{'; '.join(names)}: {reason}" for reason, names in mapping.items()]


def _name(row: Row) -> str:
    if isinstance(row, KernelRow):
        return f"{row.kernel}, {row.setting}"
    return row.method if isinstance(row, StepRow | OffloadRow | RecordingRow) else row.name


@cache
def commit() -> str:
    """The commit that measures, and whether files differ from it; 'unknown' outside a checkout."""
    try:
        command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
