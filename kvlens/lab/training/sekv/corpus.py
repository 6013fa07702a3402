"""What a real model's router is trained on where no texts are given: a book and code, as the paper's corpora (appendix
A: arXiv, books and code of RedPajama; no questions, nothing of a benchmark)."""

from __future__ import annotations

import importlib.util
import random
import sysconfig
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from kvlens.tasks import texts

PARTS = 10
"""of the book, a document each"""
MODULES = (
    "argparse",
    "ast",
    "calendar",
    "difflib",
    "fractions",
    "inspect",
    "pathlib",
    "statistics",
    "textwrap",
    "unittest.mock",
)
"""of the standard library of the Python that trains, a document each"""
PART_CHARACTERS = 40_000
"""of a part of a book that is given, at least: some 10,000 tokens"""
MODULE_BYTES = 20_000
"""of a module that goes with books that are given, at least"""


def documents() -> list[str]:
    """Parts of the book and modules in turn, so that the last tenth, which is held out, has one of each."""
    paragraphs = [" ".join(sentences) for sentences in texts.paragraphs(texts.CALIBRATION)]
    ends = [len(paragraphs) * part // PARTS for part in range(PARTS + 1)]
    book = ["\n\n".join(paragraphs[a:b]) for a, b in pairwise(ends)]
    return [document for pair in zip(book, map(_source, MODULES), strict=True) for document in pair]


def books_and_code(books: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Return parts of books (name and text of each) and long modules of the standard library, one after the other so
    that the last tenth has both, and what they are called. Books are cut between paragraphs."""
    parts: list[tuple[str, str]] = []
    for name, text in books:
        of_book = _cut(text)
        parts += [(f"{name}, part {i + 1} of {len(of_book)}", part) for i, part in enumerate(of_book)]
    modules = [(f"Python's {path.stem}", path.read_text(encoding="utf-8")) for path in _long_modules()]
    random.Random(0).shuffle(parts)
    random.Random(0).shuffle(modules)
    longer, shorter = sorted((parts, modules), key=len, reverse=True)
    every = len(longer) / max(1, len(shorter))
    places = [(i, 0, each) for i, each in enumerate(longer)] + [(i * every, 1, x) for i, x in enumerate(shorter)]
    documents = [each for _, _, each in sorted(places, key=lambda place: place[:2])]
    return [text for _, text in documents], [name for name, _ in documents]


def _cut(text: str) -> list[str]:
    """Return a text in parts of PART_CHARACTERS at least, cut between paragraphs."""
    parts: list[str] = []
    rest = ""
    for paragraph in text.replace("\r\n", "\n").split("\n\n"):
        rest += paragraph + "\n\n"
        if len(rest) >= PART_CHARACTERS:
            parts.append(rest)
            rest = ""
    return parts or [rest]


def _long_modules() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(library.glob("[!_]*.py"))
    return [path for path in paths if path.stat().st_size >= MODULE_BYTES]


def named() -> list[str]:
    """What they are, for the provenance."""
    return [f"{texts.CALIBRATION.title}, in {PARTS} parts", *(f"Python's {name}" for name in MODULES)]


def _source(name: str) -> str:
    results = importlib.util.find_spec(name)
    if results is None or results.origin is None or not (path := Path(results.origin)).is_file():
        raise ValueError(f"this Python has no source of its module '{name}': give text files to train on.")
    return path.read_text(encoding="utf-8")
