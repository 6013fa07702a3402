"""How costs grow: of lists with the number of runs, of placing, steps and recording with the number of tokens.

    python -m benchmarks.scale [--counts 500,2000,10000]
    python -m benchmarks.scale --steps heads --lengths 512,2048,8192,32768 --arms full,full/spans,snapkv/coverage
        [--rounds 2] [--new 8] [--out FILE]

The first writes twelve made-up runs, links them under so many run ids in a temporary folder and lists each folder by
`kvlens.lens.runlist.search_runs`: `new` without a catalogue, `process` by a process that finds the catalogue, `again`
by the same process. It prints one JSON object per folder: CPU and wall seconds, and as `growth` the exponent of the CPU
time over the number of runs. The load of the machine stands beside them.

The second runs `benchmarks.stepcosts` on the model after --steps and prints a row per length and arm, then the
exponents. Lines of --out are added to those that FILE has of other models, lengths and arms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kvlens
from benchmarks.stepcosts import Arm, exponents, measure
from kvlens.runs.fingerprint import machine
from tests.synthetic import write_synthetic

KINDS = 12
LISTING = """
import json, sys, time
from pathlib import Path
from kvlens.lens.listing import Search
from kvlens.lens.runlist import search_runs
figures = []
for _ in range(2):
    wall, cpu = time.perf_counter(), time.process_time()
    count = len(search_runs(Path(sys.argv[1]), Search()))
    figures.append((count, time.perf_counter() - wall, time.process_time() - cpu))
print(json.dumps(figures))
"""


def write_runs(folder: Path, source: Path, count: int) -> None:
    """Link the runs in `source` under `count` run ids in `folder`."""
    folder.mkdir()
    kinds = sorted(path for path in source.iterdir() if path.is_dir())
    for number in range(count):
        kind, run = kinds[number % len(kinds)], folder / f"20260102-{number:06}-many"
        run.mkdir()
        for name in ("trace.duckdb", "prompt.txt"):
            os.link(kind / name, run / name)
        info = json.loads((kind / "run.json").read_text(encoding="utf-8")) | {"uid": run.name}
        (run / "run.json").write_text(json.dumps(info, indent=1), encoding="utf-8")


def list_twice(folder: Path) -> list[tuple[int, float, float]]:
    """List a folder twice in a new process. Return (runs, wall seconds, CPU seconds) of each time, without imports."""
    listing = subprocess.run([sys.executable, "-c", LISTING, str(folder)], check=True, capture_output=True, text=True)
    return [(count, wall, cpu) for count, wall, cpu in json.loads(listing.stdout)]


def figures_of(folder: Path) -> dict[str, Any]:
    """Return the seconds of a folder's three listings."""
    (count, *new), _ = list_twice(folder)
    (_, *process), (_, *again) = list_twice(folder)
    named = {"new": new, "process": process, "again": again}
    return {"runs": count} | {
        name: {"wall_s": round(wall, 3), "cpu_s": round(cpu, 3)} for name, (wall, cpu) in named.items()
    }


def measure_steps(options: argparse.Namespace) -> None:
    """Measure the arms of --arms, print the rows and add them to the file after --out."""
    arms = [Arm(*text.split("/")) for text in options.arms.split(",")]
    lengths = [int(text) for text in options.lengths.split(",")]
    sitting = {"date": time.strftime("%Y-%m-%d"), "version": kvlens.__version__, "steps": options.new}
    report: dict[str, Any] = {"machine": machine(), "rows": [], "exponents": []}
    if options.out is not None and options.out.is_file():
        report = json.loads(options.out.read_text(encoding="utf-8"))
    for tokens in lengths:
        for row in measure(options.steps, [tokens], arms, options.rounds, options.new):
            line = row | sitting | {"load": round(os.getloadavg()[0], 1)}
            print(json.dumps(line), flush=True)
            report["rows"] = [old for old in report["rows"] if _arm_of(old) != _arm_of(line)] + [line]
        report["exponents"] = exponents(report["rows"])
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for growth in report["exponents"]:
        print(json.dumps(growth))


def _arm_of(row: dict[str, Any]) -> tuple[object, ...]:
    return row["model"], row["tokens"], row["arm"]


def main() -> None:
    """Write the folders and list them, or measure steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="500,2000,10000")
    parser.add_argument("--steps", metavar="MODEL")
    parser.add_argument("--lengths", default="512,2048,8192,32768")
    parser.add_argument("--arms", default="full,full/spans,full/coverage,snapkv,snapkv/spans,snapkv/coverage")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.steps is not None:
        measure_steps(options)
    else:
        measure_lists([int(text) for text in options.counts.split(",")])


def measure_lists(counts: list[int]) -> None:
    """Write the folders of runs and list them."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        previous: dict[str, Any] | None = None
        for number in range(KINDS):
            lost: dict[str, Any] = {
                "loss_step": 6 if number % 2 else 12,
                "output_text": " bridge" if number % 3 else " river",
            }
            prompt = f"Prompt {number}. " + "The river was wide and the bridge was old. " * 20
            uid = f"20260101-{number:06}-many"
            write_synthetic(
                root / "source", 2, 4, 2, 12, 8, number, uid=uid, prompt_text=prompt, answer="bridge", **lost
            )
        for count in counts:
            write_runs(root / str(count), root / "source", count)
            figures = figures_of(root / str(count)) | {"load": round(os.getloadavg()[0], 1)}
            if previous is not None:
                ratio = math.log(count / previous["runs"])
                figures["growth"] = {
                    name: round(math.log(figures[name]["cpu_s"] / previous[name]["cpu_s"]) / ratio, 2)
                    for name in ("new", "process", "again")
                }
            print(json.dumps(figures), flush=True)
            previous = figures


if __name__ == "__main__":
    main()
