"""Do the tests of the truths see a small wrong change? Each change of benchmarks/mutations.toml is made in a copy of
the sources, the few tests that should see it are run there, and the first that fails is noted; SURVIVED: none did.

    python -m benchmarks.mutations [--only WORDS] [--new] [--no-check]

The copies are temporary, the sources stay as they are; what is copied is what lay there when this began. Rows of
changes that were not made again stay in the result (kvlens/lab/results/mutations.json). docs/evidence/reliability.md
says what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlens import PACKAGE
from kvlens.models.device import machine

LIST = Path(__file__).with_name("mutations.toml")
FOLDERS = ("kvlens", "kernels", "store", "pages", "tests", "benchmarks", "docs", ".streamlit")
FILES = ("app.py", "pyproject.toml")
LONGEST_S = 280.0
"""tests that take longer count as failed: a change that hangs is seen"""
SURVIVED = "SURVIVED"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    """says: what is wrong then. In `file` the text `old`, which stands there once, becomes `new`. tests: files or node
    ids of pytest, of which one must fail."""

    says: str
    file: str
    old: str
    new: str
    tests: list[str]

    def make(self, tree: Path) -> None:
        """Change the copy. Raises ValueError where `old` does not stand there once."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times what {self.says!r} changes; say it anew.")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def mutations() -> list[Mutation]:
    """All of the list, in its order."""
    return [Mutation(**each) for each in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutation"]]


def copied(source: Path, tree: Path) -> Path:
    """A copy of the sources and tests, without anything that was compiled of them. A linked folder stays a link: its
    files exist once, so a change is what tests import."""
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / name, tree / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(source / name, tree)
    return tree


def first_failure(tree: Path, tests: Sequence[str]) -> str:
    """The first of the tests that fails in a copy, run in one process; SURVIVED where all pass. Raises RuntimeError
    where pytest itself cannot run them."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-q", "--tb=no", "-rfE", *tests]
    alone = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        completed = subprocess.run(
            command, cwd=tree, env=alone, capture_output=True, text=True, check=False, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if completed.returncode == 0:
        return SURVIVED
    named = _FAILED.search(completed.stdout)
    if completed.returncode != 1 or named is None:
        raise RuntimeError(f"pytest ended with {completed.returncode}: {(completed.stdout + completed.stderr)[-600:]}")
    return named[1]


def check(tree: Path, choice: Sequence[Mutation]) -> None:
    """The tests pass in a copy in which nothing was changed, and run its sources; SystemExit otherwise."""
    request = [sys.executable, "-B", "-c", "import kvlens; print(kvlens.__file__)"]
    completed = subprocess.run(request, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(completed).resolve().is_relative_to(tree.resolve()):
        raise SystemExit(f"The copy's tests would run {completed}, not the copy.")
    for test in sorted({test for each in choice for test in each.tests}):
        if (failed := first_failure(tree, [test])) != SURVIVED:
            raise SystemExit(f"{failed} fails without any change, so it says nothing.")


def try_mutation(plain: Path, mutation: Mutation) -> dict[str, Any]:
    """One row of the result. plain: a copy without a change."""
    start_time = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvlens-mutations-") as name:
        tree = copied(plain, Path(name))
        mutation.make(tree)
        failed = first_failure(tree, mutation.tests)
    return {
        "mutation": mutation.says,
        "file": mutation.file,
        "first_failure": failed,
        "seconds": round(time.monotonic() - start_time),
    }


def merged(known_values: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows in place of old ones, in the list's order; what survived once says so for ever."""
    previous, results = ({row["mutation"]: row for row in each} for each in (known_values, rows))
    out = []
    for each in mutations():
        row, old = results.get(each.says) or previous.get(each.says), previous.get(each.says)
        if row is None:
            continue
        survived = old is not None and (old["first_failure"] == SURVIVED or old["survived_once"])
        out.append({**row, "survived_once": survived or row["first_failure"] == SURVIVED})
    return out


def main() -> None:
    """Prints a line for each change; exit status 1 when one survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="changes whose sentence or file contains these words")
    parser.add_argument("--new", action="store_true", help="changes that have no row yet, or survived")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without a change first")
    parser.add_argument("--out", type=Path, default=Path("kvlens/lab/results/mutations.json"))
    options = parser.parse_args()
    known_values = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.exists() else []
    choice = [each for each in mutations() if options.only in each.says or options.only in each.file]
    if options.new:
        visited = {row["mutation"] for row in known_values if row["first_failure"] != SURVIVED}
        choice = [each for each in choice if each.says not in visited]
    with tempfile.TemporaryDirectory(prefix="kvlens-mutations-") as name:
        plain = copied(PACKAGE.parent, Path(name))
        if not options.no_check:
            check(plain, choice)
        for each in choice:
            row = try_mutation(plain, each)
            print(f"{row['first_failure']}  ({row['seconds']} s)  {each.file}: {each.says}", flush=True)
            known_values = merged(known_values, [row])
            result = {"machine": machine(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "rows": known_values}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if any(row["first_failure"] == SURVIVED for row in known_values) else 0)


if __name__ == "__main__":
    main()
