"""The benchmark as a whole: which parts there are, which are still to be measured, and what happens when one fails."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvlens import __version__
from kvlens.gpu.bench import ceilings, decode, headlines, kernel_checks, kernel_times, ledger, recording, tier
from kvlens.gpu.bench.device import DryDevice, pick, slug
from kvlens.gpu.bench.failures import sentence
from kvlens.gpu.bench.part import HERE, Bench, Part
from kvlens.gpu.bench.rates import MISSING, read
from kvlens.gpu.bench.result import CheckRow, Entry, KernelRow, LedgerRow, Row, StepRow, begin, put, save, today

NOTE = f"Llama-3.1-8B's shape. Decode: {decode.LABEL}."
CONTEXTS, BATCHES = (8192, 32768, 131072), (1, 8)
DRY_CONTEXTS, DRY_BATCHES = (256, 512), (1, 2)
NAMES = ("ceilings", "checks", "engine", "kernels", "decode", "recording", "ledger", "compiled", "headlines")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What to measure. `parts`: names or beginnings of names, none: all; `minutes`: no part is begun after that."""

    out: Path
    minutes: float = 10.0
    parts: Sequence[str] = ()
    dry_run: bool = False
    contexts: Sequence[int] = ()
    batches: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in self.parts:
            if not any(name.startswith(known) for known in NAMES):
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


def all_parts(contexts: Sequence[int], batches: Sequence[int]) -> list[Part]:
    """In the order that serves a short sitting best: what the others are held against, what proves them, then the rest.
    Whole steps of several sequences take long, so they come after those of one, recording and ledger; first at the
    context of the headlines."""
    one, *more = sorted(set(batches))
    middle = contexts[min(1, len(contexts) - 1)]
    others = [context for context in contexts if context != middle]

    def whole(contexts: Sequence[int], batches: Sequence[int]) -> list[Part]:
        return [part for context in contexts for batch in batches for part in decode.decodes(context, batch)]

    return [
        ceilings.PART,
        kernel_checks.PART,
        tier.PART,
        kernel_times.PART,
        *whole(contexts, [one]),
        recording.PART,
        ledger.PART,
        *whole([middle], more),
        *whole(others, more),
        decode.sweep(middle),
        *decode.compiled(middle),
        headlines.PART,
    ]


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
    header = {"dry_run": device.dry, "device": facts, "versions": versions, "note": f"{NOTE} {rates.told()}"}
    result = begin(path, header)
    bench = Bench(device, contexts, batches, result, rates)
    parts = [
        part for part in all_parts(contexts, batches) if not request.parts or part.name.startswith(tuple(request.parts))
    ]
    begun = time.monotonic()
    missing = [part.name for part in parts if not _done(result, part)]
    # what failed before comes last, so that a part which breaks the device does not keep the others from being measured
    order = sorted(
        (part for part in parts if not _done(result, part)),
        key=lambda p: (p is headlines.PART, p.name in result["entries"]),
    )
    for part in order:
        if time.monotonic() - begun > 60 * request.minutes:
            say(f"{request.minutes:g} minutes are over; run again for: {', '.join(missing)}.")
            break
        say(f"{part.name} ...")
        # should the process end in the midst, what is there says so, and the part comes last the next time
        put(
            result,
            Entry(
                part.name,
                "failed",
                part.sources,
                commit(),
                today(),
                0.0,
                _held(result, part),
                "it was begun and did not end",
            ),
        )
        save(path, result)
        entry, broken = _measure_part(bench, part)
        put(result, entry)
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


def _done(result: dict[str, Any], part: Part) -> bool:
    entry = result["entries"].get(part.name)
    # headlines are arithmetic on the other parts, so they are made anew
    return bool(entry and entry["status"] == "done" and entry["sources"] == part.sources and part is not headlines.PART)


def _held(result: dict[str, Any], part: Part) -> Sequence[Any]:
    """Rows of the part that an earlier call has left."""
    rows: Sequence[Any] = result["entries"].get(part.name, {"rows": ()})["rows"]
    return rows


def _measure_part(bench: Bench, part: Part) -> tuple[Entry, bool]:
    """The part's entry, and whether the device can be used no more."""
    begun, broken = time.monotonic(), False
    rows: list[Row] = []
    reason = suggestion = None
    try:
        for row in part.run(bench):  # what came before a failure is kept
            rows.append(row)
        if rows and all(_missing(row) for row in rows):
            reason = _missing(rows[0])
    except Exception as problem:  # one part's failure is its own
        reason, suggestion = sentence(problem, part.smaller)
        broken = not bench.device.alive()
    if not broken:
        bench.device.release()
    status: Literal["done", "failed"] = "done" if reason is None else "failed"
    return Entry(
        part.name, status, part.sources, commit(), today(), time.monotonic() - begun, rows, reason, suggestion
    ), broken


def _missing(row: Row) -> str | None:
    """Why a row has no figure; None: it has one."""
    return row.reason if isinstance(row, StepRow | KernelRow) else None


def _lacks(rows: Sequence[Row]) -> list[str]:
    """Figures that could not be had, each reason once, and checks that failed."""
    whose: dict[str, list[str]] = {}
    for row in rows:
        if isinstance(row, StepRow | KernelRow):
            if row.reason is not None:
                whose.setdefault(row.reason, []).append(
                    row.method if isinstance(row, StepRow) else f"{row.kernel}, {row.setting}"
                )
        elif isinstance(row, CheckRow | LedgerRow) and not row.passed:
            whose.setdefault("FAILED", []).append(row.name)
    return [f"{'; '.join(names)}: {reason}" for reason, names in whose.items()]


def commit() -> str:
    """The commit that measures, and whether files differ from it; 'unknown' outside a checkout."""
    try:
        command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
