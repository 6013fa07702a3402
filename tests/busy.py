"""Runs tests several times beside a process that never rests, and counts failures: `make busy`.

    python tests/busy.py --times 5 tests/unit tests/truths

A test that depends on what else the machine does fails in some of the rounds. Exit status 1 if any round fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""ends with the process that started it, however that ends"""


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    """Inside, a process that never rests takes one core."""
    spinner = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        yield
    finally:
        spinner.kill()
        spinner.wait()


def run_round(targets: list[str], limit: float | None) -> tuple[Counter[str], list[str], float]:
    """Run the tests once. Return the outcomes with their counts, the tests that failed, and the wall seconds."""
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-rfE", "--no-header", *targets]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return Counter(timeout=1), [], time.monotonic() - start
    lines = done.stdout.splitlines()
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return count_outcomes(lines[-1] if lines else "", done.returncode), failed, time.monotonic() - start


def count_outcomes(last_line: str, status: int) -> Counter[str]:
    """Return outcomes with their counts from pytest's last line, and `broken` if pytest ended without counting."""
    outcomes = Counter({word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)", last_line)})
    if not outcomes or status not in (0, 1):
        outcomes["broken"] = 1
    return outcomes


def bad(outcomes: Counter[str]) -> int:
    """Return how many outcomes are no passed test."""
    return sum(number for word, number in outcomes.items() if word != "passed")


def main(arguments: list[str] | None = None) -> int:
    """Run the rounds beside one busy process, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["tests/unit", "tests/truths"], help="what pytest runs")
    parser.add_argument("--times", type=int, default=5, help="rounds")
    parser.add_argument("--limit", type=float, help="seconds of a round at most")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    rounds = []
    with spinning():
        for number in range(1, options.times + 1):
            outcomes, failed, seconds = run_round(options.targets, options.limit)
            rounds.append({"outcomes": dict(outcomes), "failed": failed, "seconds": round(seconds, 1)})
            print(f"round {number}: {dict(outcomes)}, {seconds:.0f} s", *failed, sep="\n  ", flush=True)
    failures = sum(bad(Counter(row["outcomes"])) for row in rounds)
    print(f"{failures} failures in {options.times} rounds of {' '.join(options.targets)}")
    if options.out is not None:
        options.out.write_text(json.dumps(rounds, indent=1) + "\n", encoding="utf-8")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
