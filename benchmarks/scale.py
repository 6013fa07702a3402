"""How costs grow: of lists with the number of runs, of placing, steps and recording with the number of tokens.

    python -m benchmarks.scale [--counts 500,2000,10000]
    python -m benchmarks.scale --steps heads --lengths 512,2048,8192,32768 --arms full,full/spans,snapkv/coverage
        [--rounds 2] [--new 8] [--out FILE]
    python -m benchmarks.scale --placing [--lengths 512,1024,2048,4096,8192,16384,32768] [--rounds 2] [--out FILE]
    python -m benchmarks.scale --memory snapkv,quest --lengths 8192 [--drawn] [--out FILE]
    python -m benchmarks.scale --batch 8 --steps smollm2 --lengths 1024 --arms snapkv,snapkv/coverage --new 17
        [--study snapkv,h2o] [--out FILE]

The first writes twelve made-up runs, links them under so many run ids in a temporary folder and lists each folder by
`kvlens.lens.runlist.search_runs`: `new` without a catalogue, `process` by a process that finds the catalogue, `again`
by the same process. It prints one JSON object per folder: CPU and wall seconds, and as `growth` the exponent of the CPU
time over the number of runs. The load of the machine stands beside them.

The second runs `benchmarks.stepcosts` on the model after --steps and prints a row per length and arm, then the
exponents. Lines of --out are added to those that FILE has of other models, lengths and arms. The third runs
`benchmarks.placingcosts`: k-means alone. The fourth runs `benchmarks.peakmemory` in a process for each method and
length. The fifth runs `benchmarks.batchcosts`: steps of so many prompts together against one prompt after the other,
and with --study a study's trials a minute under these methods, both ways.
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

import torch

import kvlens
from benchmarks import batchcosts, placingcosts
from benchmarks.stepcosts import Arm, exponents, measure
from kvlens.models.device import machine
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


class Report:
    """Rows of a file, of which new ones replace those of the same model, tokens and arm."""

    def __init__(self, path: Path | None, steps: int) -> None:
        self._path = path
        self._sitting = {"date": time.strftime("%Y-%m-%d"), "version": kvlens.__version__, "steps": steps}
        self.content: dict[str, Any] = {"machine": machine(), "rows": [], "exponents": []}
        if path is not None and path.is_file():
            self.content = json.loads(path.read_text(encoding="utf-8"))

    def add(self, row: dict[str, Any]) -> None:
        """Print a row with its sitting and the machine's load, and keep it."""
        line = row | self._sitting | {"load": round(os.getloadavg()[0], 1)}
        print(json.dumps(line), flush=True)
        self.content["rows"] = [old for old in self.content["rows"] if _arm_of(old) != _arm_of(line)] + [line]

    def save(self, growths: list[dict[str, Any]]) -> None:
        """Keep and write how costs grow; print it."""
        models = {growth["model"] for growth in growths}
        earlier = [old for old in self.content["exponents"] if old["model"] not in models]
        self.content["exponents"] = earlier + growths
        if self._path is not None:
            self._path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        for growth in growths:
            print(json.dumps(growth))


def measure_steps(options: argparse.Namespace) -> None:
    """Measure the arms of --arms, print the rows and add them to the file after --out."""
    arms = [Arm(*text.split("/")) for text in options.arms.split(",")]
    report = Report(options.out, options.new)
    for tokens in _lengths(options):
        for row in measure(options.steps, [tokens], arms, options.rounds, options.new):
            report.add(row)
        rows = [row for row in report.content["rows"] if "step_cpu_s" in row or "refused" in row]
        report.save(exponents(rows))


def measure_placing(options: argparse.Namespace) -> None:
    """Measure k-means at all lengths."""
    report, rows = Report(options.out, 0), placingcosts.measure(_lengths(options), options.rounds)
    for row in rows:
        report.add(row)
    report.save(placingcosts.growth(rows))


def measure_memory(options: argparse.Namespace) -> None:
    """Measure the peak of each method and length in a process of its own."""
    report = Report(options.out, 0)
    for tokens in _lengths(options):
        for method in options.memory.split(","):
            command = [sys.executable, "-m", "benchmarks.peakmemory", str(tokens), method]
            ran = subprocess.run([*command, *["--drawn"] * options.drawn], check=True, capture_output=True, text=True)
            report.add({"model": "heads", "arm": f"{method}, memory"} | json.loads(ran.stdout.splitlines()[-1]))
    report.save([])


def measure_batch(options: argparse.Namespace) -> None:
    """Measure the arms of --arms in a batch, or a study under the methods of --study."""
    report = Report(options.out, options.new)
    for tokens in _lengths(options):
        if options.study:
            report.add(batchcosts.measure_study(options.steps, tokens, options.study, options.batch, options.new))
            continue
        arms = [Arm(*text.split("/")) for text in options.arms.split(",")]
        for row in batchcosts.measure_steps(options.steps, tokens, arms, options.batch, options.rounds, options.new):
            report.add(row)
    report.save([])


def _lengths(options: argparse.Namespace) -> list[int]:
    return [int(text) for text in options.lengths.split(",")]


def _arm_of(row: dict[str, Any]) -> tuple[object, ...]:
    return row["model"], row["tokens"], row["arm"]


def main() -> None:
    """Write the folders and list them, or measure steps, placing or memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="500,2000,10000")
    parser.add_argument("--steps", metavar="MODEL")
    parser.add_argument("--placing", action="store_true")
    parser.add_argument("--memory", metavar="METHODS")
    parser.add_argument("--drawn", action="store_true")
    parser.add_argument("--lengths", default="512,2048,8192,32768")
    parser.add_argument("--arms", default="full,full/spans,full/coverage,snapkv,snapkv/spans,snapkv/coverage")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--study", metavar="METHODS")
    options = parser.parse_args()
    torch.set_num_threads(1)  # before a report says how many there are
    if options.batch is not None:
        measure_batch(options)
    elif options.steps is not None:
        measure_steps(options)
    elif options.placing:
        measure_placing(options)
    elif options.memory is not None:
        measure_memory(options)
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
