"""What every consumer does with a crafted trace beside a good run.

    python -m benchmarks.damage [--only WORD] [--out FILE]

Every kind of damage of tests/fault/crafted.py is done to a run, and the run is opened. Then a folder with a good run
and a damaged one meets the consumers, in a process of its own: the command line, the API, the pages. The first kind of
a group meets all of them, once for kinds that open and once for kinds that do not; other kinds that open meet a few. An
exception that is no sentence counts as a traceback; consumers that take longer than LONGEST_S hang. The command writes
the counts that `python -m kvlens.lab.studies.damage` draws as docs/evidence/damage.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.damageconsumers import BAD, GOOD, call, consumers
from kvlens import __version__
from kvlens.models.device import machine
from tests.fault.crafted import Kind, damage, kinds
from tests.synthetic import write_synthetic

OUT = Path("kvlens/lab/results/damage.json")
LONGEST_S = 120
"""consumers that take longer, a few together, hang"""
BATCH = 60
"""kinds that one process opens"""


def write_base(folder: Path) -> None:
    """Write the good run, and the one that is damaged, in folders of their own."""
    fields: dict[str, Any] = {
        "answer": "4172",
        "reference": GOOD,
        "oracle": {"every": 1, "layers": [0, 1]},
        "prompt_tokens": 120,
    }
    write_synthetic(folder, 2, 4, 2, 6, 8, uid=GOOD, **(fields | {"reference": None}))
    write_synthetic(folder, 2, 4, 2, 6, 8, uid=BAD, seed=1, **fields)


def apart(work: Callable[[Path], Any], longest_s: float) -> Any:
    """Run `work` in a forked process with a folder of its own. Returns its JSON, or {"hang": what it did last}."""
    with tempfile.TemporaryDirectory(prefix="damage-") as name:
        folder = Path(name)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT), 2)
            status = 1
            try:
                (folder / "out").write_text(json.dumps(work(folder)), encoding="utf-8")
                status = 0
            finally:
                os._exit(status)
        until = time.monotonic() + longest_s
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return {"hang": (folder / "now").read_text(encoding="utf-8") if (folder / "now").exists() else "start"}
            time.sleep(0.02)
        out = folder / "out"
        return (
            json.loads(out.read_text(encoding="utf-8"))
            if out.exists()
            else {"died": (folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:]}
        )


def open_kinds(base: Path, selection: list[Kind]) -> Callable[[Path], list[str]]:
    """Work for `apart`: open each kind. Returns `done` or the code of the refusal per kind, '' where the file does not
    take the damage."""

    def work(folder: Path) -> list[str]:
        import kvlens

        results = []
        for number, kind in enumerate(selection):
            (folder / "now").write_text(kind.name, encoding="utf-8")
            runs = folder / str(number)
            shutil.copytree(base, runs)
            is_damaged = damage(runs / BAD / "trace.duckdb", kind)
            results.append(call(lambda runs=runs: kvlens.open(BAD, runs=runs).reader) if is_damaged else "")  # type: ignore[misc]
            shutil.rmtree(runs)
        return results

    return work


def driven(base: Path, kind: Kind, every: bool) -> Callable[[Path], dict[str, str]]:
    """Work for `apart`: do the damage, then run the consumers. Returns what each came to."""

    def work(folder: Path) -> dict[str, str]:
        runs = folder / "runs"
        shutil.copytree(base, runs)
        damage(runs / BAD / "trace.duckdb", kind)
        results = {}
        for name, consume in consumers(runs, every).items():
            (folder / "now").write_text(name, encoding="utf-8")
            results[name] = consume()
        return results

    return work


def main() -> None:
    """Try every kind and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    parser.add_argument("--minutes", type=float, default=60.0, help="then stop; the next call goes on with the file")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="damage-base-"))
    apart(lambda _: write_base(base), LONGEST_S)
    selection = [kind for kind in kinds() if arguments.only in kind.name]
    rows: list[dict[str, Any]] = []
    if arguments.out.exists():
        earlier_rows = {row["kind"]: row for row in json.loads(arguments.out.read_text(encoding="utf-8"))["rows"]}
        selection = [kind for kind in selection if kind.name in earlier_rows]
        rows = [earlier_rows[kind.name] for kind in selection]
    for start in range(0, 0 if rows else len(selection), BATCH):
        batch = selection[start : start + BATCH]
        results = apart(open_kinds(base, batch), LONGEST_S)
        if isinstance(results, dict):
            raise SystemExit(f"opening ended: {results}")
        rows += [
            {"kind": kind.name, "group": kind.group, "sound": kind.sound, "open": result}
            for kind, result in zip(batch, results, strict=True)
        ]
        print(f"{len(rows)} of {len(selection)} opened", file=sys.stderr, flush=True)
    met = {(row["group"], row["open"] == "done") for row in rows if "consumers" in row}
    until = time.monotonic() + 60 * arguments.minutes
    for row, kind in zip(rows, selection, strict=True):
        met_key = kind.group, row["open"] == "done"
        every = met_key not in met
        if "consumers" in row or (not every and not met_key[1]):
            continue
        if time.monotonic() > until:
            break
        met.add(met_key)
        row |= judged(apart(driven(base, kind, every), 4 * LONGEST_S))
        if row["tracebacks"] or row["hangs"] or row["wrong"]:
            print(json.dumps(row), flush=True)
        write_rows(arguments.out, rows)
    shutil.rmtree(base)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a result, one row a line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{\n "about": {json.dumps(machine_and_date())},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def machine_and_date() -> dict[str, Any]:
    """Version, machine and date of the trial."""
    return {"kvlens": __version__, "machine": machine(), "date": time.strftime("%Y-%m-%d", time.gmtime())}


def judged(result: Any) -> dict[str, Any]:
    """What the consumers of one kind came to: how many ran, and those with a traceback, a hang, a wrong refusal."""
    stopped = result.keys() & {"hang", "died"}
    outcomes = {} if stopped else result
    tracebacks = {name: text for name, text in outcomes.items() if text.startswith("traceback")}
    return {
        "consumers": len(outcomes),
        "tracebacks": tracebacks | ({"process": result["died"]} if "died" in result else {}),
        "wrong": {name: text for name, text in outcomes.items() if text.startswith("wrong")},
        "hangs": [result["hang"]] if "hang" in result else [],
    }


if __name__ == "__main__":
    main()
