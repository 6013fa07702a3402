"""From nothing to the first token: how long a new process `kvlens run` takes to have its model, and to its first answer
token. Seconds by the clock and of the processor; on a busy machine the second say more. Threads are what `kvlens run`
takes by itself, unless its option --threads is given.

    python -m benchmarks.cold_start PROMPT.json [ROUNDS] [OPTIONS OF kvlens run]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

POINTS = {"load": "loaded", "decode": "first_token", "store": "stored"}
"""phase, whose first progress it is -> what has been reached"""


def cold(options: list[str], prompt: dict[str, Any], rounds: int) -> dict[str, float]:
    """Medians, with the smallest and largest: NAME_s, NAME_s_low, NAME_s_high, NAME_cpu_s and its two for each of
    POINTS, of two tokens. options: of `kvlens run`; prompt: as its file has it."""
    visited: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompt.json"
        file.write_text(json.dumps(prompt), encoding="utf-8")
        request = ["run", str(file), *options, "--max-new", "2", "--runs", folder, "--progress-json"]
        for _ in range(rounds):
            for name, value in once(request).items():
                visited.setdefault(name, []).append(value)
    mapping: dict[str, float] = {}
    for name, values in visited.items():
        mapping |= {name: median(values), f"{name}_low": min(values), f"{name}_high": max(values)}
    return mapping


def once(texts: list[str]) -> dict[str, float]:
    """The same of one process. Raises RuntimeError where it fails."""
    reached: dict[str, float] = {}
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "kvlens", *texts], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            name = POINTS.get(message["phase"])
            if name is not None and message["done"] and f"{name}_s" not in reached:
                reached |= {f"{name}_s": time.perf_counter() - start, f"{name}_cpu_s": cpu_s(process.pid)}
    if process.returncode:
        raise RuntimeError(f"`kvlens {' '.join(texts)}` ended with {process.returncode}: nothing was measured.")
    return reached


def cpu_s(pid: int) -> float:
    """Seconds of the processor that all threads of a process have taken so far, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the medians."""
    if len(sys.argv) < 2:
        sys.exit("Name a prompt's file, as `kvlens prompt --json --out PROMPT.json` makes it.")
    prompt = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rounds, options = (sys.argv[2:3] or ["5"])[0], sys.argv[3:]
    print(json.dumps(cold(options, prompt, int(rounds)), indent=1))


if __name__ == "__main__":
    main()
