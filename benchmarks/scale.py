"""How lists of runs grow with the number of runs.

Usage: python -m benchmarks.scale [--counts 500,2000,10000]. Writes twelve made-up runs, links them under so many run
ids in a temporary folder and lists each folder by `kvlens.lens.runlist.search_runs`: `new` without a catalogue,
`process` by a process that finds the catalogue, `again` by the same process. Prints one JSON object per folder: CPU and
wall seconds, and as `growth` the exponent of the CPU time over the number of runs. The load of the machine stands
beside them."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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


def main() -> None:
    """Write the folders and list them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="500,2000,10000")
    counts = [int(text) for text in parser.parse_args().counts.split(",")]
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
