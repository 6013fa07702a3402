"""Names that say nothing: bare participles, prepositions and pronouns as variables or parameters (`make lint`).

`tests/vaguenames.txt` holds how many each file has. A file may have fewer, never more; `--write` lowers the counts.
So new and changed lines need nouns, in any clone, and old lines are mended file by file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ratchet

ROOT = Path(__file__).resolve().parents[1]
BASELINE = Path(__file__).with_suffix(".txt")
WORDS = frozenset(
    (
        "after",
        "asked",
        "at",
        "before",
        "began",
        "begun",
        "by",
        "chosen",
        "done",
        "first",
        "found",
        "gone",
        "given",
        "kept",
        "known",
        "left",
        "made",
        "mine",
        "of",
        "on",
        "one",
        "other",
        "others",
        "own",
        "said",
        "seen",
        "some",
        "taken",
        "there",
        "told",
        "wanted",
        "what",
        "whose",
    )
)
"""none names the thing that the variable holds; underscores around a word do not count"""


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each parameter and each assigned name with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def is_vague(name: str) -> bool:
    """Return True if the name is one bare word of the list."""
    return name.strip("_") in WORDS


def vague_names(path: Path) -> list[tuple[str, int]]:
    """Return the vague names of a file with their lines, in the order of the lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return sorted(((name, line) for name, line in names(tree) if is_vague(name)), key=lambda pair: pair[1])


def python_files(root: Path = ROOT) -> list[str]:
    """Return the Python files of the repository outside tests/, new ones too, each once and never through a link."""
    listed = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    output = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    files = sorted({name for name in output.splitlines() if not name.startswith("tests/")})
    return [name for name in files if (root / name).is_file() and not (root / name).is_symlink()]


def counts(root: Path = ROOT) -> Counter[str]:
    """Return how many vague names each file has; files without one are left out."""
    return +Counter({name: len(vague_names(root / name)) for name in python_files(root)})


def share(root: Path = ROOT) -> float:
    """Return the share of vague names among all names."""
    total = sum(1 for name in python_files(root) for _ in names(ast.parse((root / name).read_text(encoding="utf-8"))))
    return counts(root).total() / max(total, 1)


def report(name: str, count: int, allowed: int) -> None:
    """Print the vague names of a file whose count rose."""
    print(f"{name}: {count} vague names, {allowed} allowed. Name the thing that each holds:")
    for vague, line in vague_names(ROOT / name):
        print(f"  {name}:{line}: {vague}")


def main() -> int:
    """Print every vague name of the files whose count rose and return 1; else return 0."""
    present = counts()
    return ratchet.hold(
        __doc__, BASELINE, present, lambda: f"{present.total()} vague names, {100 * share():.1f} % of all.", report
    )


if __name__ == "__main__":
    sys.exit(main())
