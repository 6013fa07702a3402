"""A count per file that may fall and never rise (`tests/prose.py`, `tests/vaguenames.py`).

A baseline holds the counts that files had, one line each: "2 unit/test_cli.py". A new or moved file had none."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path


def read_baseline(path: Path) -> dict[str, int]:
    """Return the counts that files had: {"unit/test_cli.py": 2}."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {name: int(count) for count, name in (line.split(maxsplit=1) for line in lines)}


def rises(present: Counter[str], baseline: dict[str, int]) -> list[str]:
    """Return the files that have more than before; a new or moved file had none."""
    return sorted(name for name, count in present.items() if count > baseline.get(name, 0))


def hold(
    description: str | None,
    path: Path,
    present: Counter[str],
    total: Callable[[], str],
    report: Callable[[str, int, int], None],
) -> int:
    """Compare with the baseline, or store the counts under `--write`. total: the sentence that is printed then; report:
    prints the finds of a file whose count rose, given its name, its count and the count allowed. Return the process's
    status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", action="store_true", help="store the counts of now")
    if parser.parse_args().write:
        path.write_text("".join(f"{count} {name}\n" for name, count in sorted(present.items())), encoding="utf-8")
        print(total())
        return 0
    baseline = read_baseline(path)
    risen = rises(present, baseline)
    for name in risen:
        report(name, present[name], baseline.get(name, 0))
    return 1 if risen else 0
