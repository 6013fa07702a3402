"""What a real model's router is trained on where no texts are given: a book and code, as the paper's corpora (appendix
A: arXiv, books and code of RedPajama; no questions, nothing of a benchmark)."""

from __future__ import annotations

import importlib.util
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


def documents() -> list[str]:
    """Parts of the book and modules in turn, so that the last tenth, which is held out, has one of each."""
    paragraphs = [" ".join(sentences) for sentences in texts.paragraphs(texts.CALIBRATION)]
    ends = [len(paragraphs) * part // PARTS for part in range(PARTS + 1)]
    book = ["\n\n".join(paragraphs[a:b]) for a, b in pairwise(ends)]
    return [document for pair in zip(book, map(_source, MODULES), strict=True) for document in pair]


def named() -> list[str]:
    """What they are, for the provenance."""
    return [f"{texts.CALIBRATION.title}, in {PARTS} parts", *(f"Python's {name}" for name in MODULES)]


def _source(name: str) -> str:
    results = importlib.util.find_spec(name)
    if results is None or results.origin is None or not (path := Path(results.origin)).is_file():
        raise ValueError(f"this Python has no source of its module '{name}': give text files to train on.")
    return path.read_text(encoding="utf-8")
