"""Kills, damage and hostile input, over and over, with a time limit: what was committed must be there afterwards,
nothing may hang or crash, whatever is refused is refused in one sentence, and memory does not grow. `make soak`, or
python -m benchmarks.soak --minutes 10.

Every attempt runs in a process of its own, forked from this one, which opens no database itself. A sitting goes on
where the one before it ended: its attempts are other ones, and its counts are added to kvlens/lab/results/soak.json
with their date and the code they were made with. The figures of docs/evidence/reliability.md are those of that file.

A sitting in the file may name attempts that are `set_aside` by hand, with all their outcomes and the reason: they stay
to be read, and no total has them.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import soakkills
from benchmarks.soakfiles import DAMAGES, PROMPTS, TRACES, foreign
from benchmarks.soakforks import forked
from kvlens import __version__
from kvlens.app.ui.common.warm import Warm
from kvlens.lab.bench.sources import code
from kvlens.models.device import machine
from kvlens.store.recover import recover
from tests.synthetic import write_synthetic

Outcomes = dict[str, dict[str, int]]
"""label -> outcome -> attempts"""
Attempt = Callable[[Path, random.Random, int], list[tuple[str, str]]]
"""(folder of its own, what it draws from, its number) -> (label, outcome) of what was tried"""
READS = (("read", soakkills.read_whole), ("recover", lambda folder: recover(folder, soakkills.UID)))
GOOD = {"kept", "nothing was committed", "read", "one sentence", "done", "refused", "shown", "flat", "ended first"}


@dataclass(frozen=True)
class Part:
    """wanted: attempts in all, over all sittings; short: in the test suite; share: of a sitting's time."""

    wanted: int
    short: int
    share: float


PARTS = {
    "writer": Part(1000, 3, 0.18),
    "recover": Part(300, 2, 0.11),
    "delete": Part(100, 2, 0.05),
    "run": Part(100, 0, 0.15),
    "warm": Part(50, 0, 0.06),
    "damage": Part(100 * len(DAMAGES), len(DAMAGES), 0.13),
    "traces": Part(len(TRACES) * len(READS), 6, 0.03),
    "prompts": Part(len(PROMPTS), 6, 0.02),
    "models": Part(60, 0, 0.05),
    "queries": Part(300, 0, 0.1),
    "memory": Part(2, 0, 0.12),
}


def attempts(top: Path, seconds: Callable[[], float]) -> dict[str, Attempt]:
    """How each part tries. seconds: what is left of the part's time."""
    died, whole, kinds, warm = top / "died", top / "whole", list(DAMAGES), Warm()
    forked(
        lambda: write_synthetic(
            died, 2, 4, 2, steps=96, spans=12, uid=soakkills.UID, writer_class=soakkills.DyingWriter
        )
    )
    forked(lambda: write_synthetic(whole, 2, 4, 2, steps=96, spans=12, uid=soakkills.UID))

    def damaged(position: Path, draw: random.Random, n: int) -> list[tuple[str, str]]:
        kind = kinds[n % len(kinds)]
        return [(f"damage: {kind}", soakkills.damaged(position, draw, died, whole, kind))]

    def trace(position: Path, draw: random.Random, n: int) -> list[tuple[str, str]]:
        changes, (name, call) = TRACES[n // len(READS) % len(TRACES)], READS[n % len(READS)]
        foreign(position / soakkills.UID, changes)
        return [(f"foreign traces, {name}", forked(lambda: call(position))[0])]

    def prompt(position: Path, draw: random.Random, n: int) -> list[tuple[str, str]]:
        from kvlens.text.promptfiles import decode

        return [("prompt files", forked(lambda: decode(PROMPTS[n % len(PROMPTS)], "p.json").text[:0])[0])]

    def model(position: Path, draw: random.Random, n: int) -> list[tuple[str, str]]:
        from benchmarks.soakmodels import loaded

        return [("model folders", loaded(position, top / "model", draw, n))]

    def queries(position: Path, draw: random.Random, n: int) -> list[tuple[str, str]]:
        from benchmarks.soakpages import visited

        return [("queries", outcome) for outcome in visited(position, draw)]

    def memory(position: Path, draw: random.Random, n: int) -> list[tuple[str, str]]:
        from benchmarks.soakpages import flat

        return [("memory", outcome) for outcome in flat(position, seconds())]

    return {
        "writer": lambda position, draw, n: [("kills: writer", soakkills.kill_writer(position, draw))],
        "recover": lambda position, draw, n: [("kills: recover", soakkills.kill_recover(position, draw, died))],
        "delete": lambda position, draw, n: [("kills: delete", soakkills.kill_delete(position, draw, died))],
        "run": lambda position, draw, n: [("kills: run", soakkills.kill_run(position, draw))],
        "warm": lambda position, draw, n: [("kills: forked run", soakkills.kill_warm(position, draw, warm))],
        "damage": damaged,
        "traces": trace,
        "prompts": prompt,
        "models": model,
        "queries": queries,
        "memory": memory,
    }


def soak(
    minutes: float,
    short: bool,
    earlier_attempts: Mapping[str, int] | None = None,
    only: Sequence[str] = tuple(PARTS),
    keep: Callable[[Outcomes, dict[str, int]], None] = lambda results, result: None,
) -> tuple[Outcomes, dict[str, int]]:
    """Runs the parts in turn, each for its share of the time -> outcomes by label, and attempts by part, which `keep`
    is told after every part. earlier_attempts: attempts of each part by now; a part that has all it wants gives its
    time to the others, unless all of `only` have."""
    results: dict[str, Counter[str]] = {}
    started_job = dict.fromkeys(PARTS, 0) | dict(earlier_attempts or {})
    due = [name for name in only if (PARTS[name].short if short else PARTS[name].wanted > started_job[name])]
    due = due or list(only)
    result = dict.fromkeys(PARTS, 0)
    until = 0.0
    with tempfile.TemporaryDirectory(prefix="kvlens-soak-") as folder:
        top = Path(folder)
        tries = attempts(top, lambda: until - time.monotonic())
        for name in due:
            part = PARTS[name]
            until = time.monotonic() + 60 * minutes * part.share / sum(PARTS[each].share for each in due)
            while time.monotonic() < until and not (short and result[name] >= part.short):
                number = started_job[name] + result[name]
                if not short and started_job[name] < part.wanted <= number:
                    break
                position = top / f"{name}-{number}"
                position.mkdir()
                outcomes = tries[name](position, random.Random(f"{name}/{number}"), number)
                for label, outcome in outcomes:
                    results.setdefault(label, Counter())[outcome] += 1
                result[name] += len(outcomes)
                shutil.rmtree(position)
                if not outcomes:  # what is left of the time is too little to say anything
                    break
            keep({label: dict(outcomes) for label, outcomes in results.items()}, result)
    return {label: dict(outcomes) for label, outcomes in results.items()}, result


def bad(results: Outcomes) -> Outcomes:
    """What must not be: every outcome that is none of the good ones."""
    wrong = {part: {each: n for each, n in outcomes.items() if each not in GOOD} for part, outcomes in results.items()}
    return {part: outcomes for part, outcomes in wrong.items() if outcomes}


def added(several: Sequence[Outcomes]) -> Outcomes:
    """Counts of several sittings together."""
    total: dict[str, Counter[str]] = {}
    for results in several:
        for label, outcomes in results.items():
            total.setdefault(label, Counter()).update(outcomes)
    return {label: dict(outcomes) for label, outcomes in sorted(total.items())}


def with_sitting(mapping: dict[str, Any], sitting: dict[str, Any]) -> dict[str, Any]:
    """The result with one more sitting."""
    sittings = [*mapping.get("sittings", []), sitting]
    attempts = Counter(mapping.get("attempts", {}))
    attempts.update(sitting["attempts"])
    outcomes = added([each["outcomes"] for each in sittings])
    minutes = round(sum(each["minutes"] for each in sittings), 1)
    return {"attempts": dict(attempts), "minutes": minutes, "outcomes": outcomes, "sittings": sittings}


def main() -> None:
    """Adds a sitting to the result and prints all counts; exit status 1 when anything was lost, hung, crashed or
    grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="of these alone")
    parser.add_argument("--out", type=Path, default=Path("kvlens/lab/results/soak.json"))
    options = parser.parse_args()
    previous = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    start_time = time.monotonic()
    about = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "kvlens": __version__,
        "code": code(["kvlens.store.recover", "kvlens.store.walmend", "kvlens.text.prompts", "kvlens.runs.carrying"]),
        "machine": machine(),
    }

    def keep(results: Outcomes, product: dict[str, int]) -> None:
        minutes = round((time.monotonic() - start_time) / 60, 1)
        result = with_sitting(previous, {**about, "minutes": minutes, "attempts": dict(product), "outcomes": results})
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    results, _ = soak(options.minutes, False, previous.get("attempts"), options.parts, keep)
    print(json.dumps(results, indent=1))
    sys.exit(1 if bad(results) else 0)


if __name__ == "__main__":
    main()
