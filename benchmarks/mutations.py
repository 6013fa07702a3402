"""Do the tests of the truths see a small wrong change? Each change of benchmarks/mutations.toml is made in a copy of
the sources, the few tests that should see it are run there, and the first that fails is noted; SURVIVED: none did.

    python -m benchmarks.mutations [--only WORDS] [--new] [--no-check]

The copies are temporary, the sources stay as they are; what is copied is what lay there when this began. Rows of
changes that were not made again stay in the result (kvlens/lab/results/mutations.json). docs/reliability.md has what
was found.
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
from kvlens.runs.machine import machine

LIST = Path(__file__).with_name("mutations.toml")
FOLDERS = ("kvlens", "kernels", "store", "pages", "tests", "benchmarks", ".streamlit")
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
    """A copy of the sources and tests, without anything that was compiled of them."""
    for name in FOLDERS:
        shutil.copytree(source / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in FILES:
        shutil.copy(source / name, tree)
    return tree


def first_failure(tree: Path, tests: Sequence[str]) -> str:
    """The first of the tests that fails in a copy, run in one process; SURVIVED where all pass. Raises RuntimeError
    where pytest itself cannot run them."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-q", "--tb=no", "-rfE", *tests]
    alone = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=alone, capture_output=True, text=True, check=False, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode == 0:
        return SURVIVED
    named = _FAILED.search(done.stdout)
    if done.returncode != 1 or named is None:
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
    return named[1]


def check(tree: Path, chosen: Sequence[Mutation]) -> None:
    """The tests pass in a copy in which nothing was changed, and run its sources; SystemExit otherwise."""
    asked = [sys.executable, "-B", "-c", "import kvlens; print(kvlens.__file__)"]
    found = subprocess.run(asked, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).resolve().is_relative_to(tree.resolve()):
        raise SystemExit(f"The copy's tests would run {found}, not the copy.")
    for test in sorted({test for each in chosen for test in each.tests}):
        if (failed := first_failure(tree, [test])) != SURVIVED:
            raise SystemExit(f"{failed} fails without any change, so it says nothing.")


def tried(plain: Path, mutation: Mutation) -> dict[str, Any]:
    """One row of the result. plain: a copy without a change."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvlens-mutations-") as name:
        tree = copied(plain, Path(name))
        mutation.make(tree)
        failed = first_failure(tree, mutation.tests)
    return {
        "mutation": mutation.says,
        "file": mutation.file,
        "first_failure": failed,
        "seconds": round(time.monotonic() - begun),
    }


def merged(known: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows in place of old ones, in the list's order; what survived once says so for ever."""
    before, found = ({row["mutation"]: row for row in each} for each in (known, rows))
    out = []
    for each in mutations():
        row, old = found.get(each.says) or before.get(each.says), before.get(each.says)
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
    asked = parser.parse_args()
    known = json.loads(asked.out.read_text(encoding="utf-8"))["rows"] if asked.out.exists() else []
    chosen = [each for each in mutations() if asked.only in each.says or asked.only in each.file]
    if asked.new:
        seen = {row["mutation"] for row in known if row["first_failure"] != SURVIVED}
        chosen = [each for each in chosen if each.says not in seen]
    with tempfile.TemporaryDirectory(prefix="kvlens-mutations-") as name:
        plain = copied(PACKAGE.parent, Path(name))
        if not asked.no_check:
            check(plain, chosen)
        for each in chosen:
            row = tried(plain, each)
            print(f"{row['first_failure']}  ({row['seconds']} s)  {each.file}: {each.says}", flush=True)
            known = merged(known, [row])
            made = {"machine": machine(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "rows": known}
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if any(row["first_failure"] == SURVIVED for row in known) else 0)


if __name__ == "__main__":
    main()
