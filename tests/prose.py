"""Tests that quote prose: functions with four words of prose or more inside an assertion (`make lint`).

A test that quotes a sentence breaks when the sentence is mended. Assert the code and the values. `tests/prose.txt`
holds how many such functions each file has. A file may have fewer, never more; `--write` lowers the counts."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ratchet

TESTS = Path(__file__).resolve().parent
BASELINE = Path(__file__).with_suffix(".txt")
PROSE = re.compile(r"(?:\b[A-Za-z][a-z']*,? ){3}[a-z]+\b")
"""four words in a row, with no digit, sign or underscore between them"""


COMPARING = frozenset(("count", "endswith", "findall", "fullmatch", "match", "search", "startswith"))
"""calls that compare a text with their argument; what other calls are given is data"""

DATA = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict)


def constants(assertion: ast.AST) -> Iterator[str]:
    """Yield every text that an assertion compares with, the fixed parts of f-strings included."""
    if isinstance(assertion, ast.Constant) and isinstance(assertion.value, str):
        yield assertion.value
    function = getattr(assertion, "func", None)
    name = getattr(function, "attr", getattr(function, "id", ""))
    for child in ast.iter_child_nodes(assertion):
        if function is None or name in COMPARING or not isinstance(child, DATA):
            yield from constants(child)


def assertions(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the conditions of `assert` and the patterns of `pytest.raises(match=...)`; no message of an assert."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.keyword) and node.arg == "match":
            yield node.value


def quoting_functions(path: Path) -> list[tuple[str, int, str]]:
    """Return name, line and first sentence of every test function of a file that quotes prose."""
    quotes = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            texts = (text for assertion in assertions(node) for text in constants(assertion))
            sentence = next((text for text in texts if PROSE.search(text)), None)
            if sentence is not None:
                quotes.append((node.name, node.lineno, sentence))
    return sorted(quotes, key=lambda quote: quote[1])


def counts(root: Path = TESTS) -> Counter[str]:
    """Return how many functions of each test file quote prose; files without one are left out."""
    return +Counter(
        {str(path.relative_to(root)): len(quoting_functions(path)) for path in sorted(root.rglob("test_*.py"))}
    )


def report(name: str, count: int, allowed: int) -> None:
    """Print the quotes of a file whose count rose."""
    print(f"{name}: {count} functions quote prose, {allowed} allowed. Assert codes and values:")
    for function, line, sentence in quoting_functions(TESTS / name):
        print(f"  tests/{name}:{line}: {function}: {sentence[:80]!r}")


def main() -> int:
    """Print the quotes of the files whose count rose and return 1; else return 0."""
    present = counts()
    return ratchet.hold(__doc__, BASELINE, present, lambda: f"{present.total()} test functions quote prose.", report)


if __name__ == "__main__":
    sys.exit(main())
