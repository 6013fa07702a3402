"""The words of kvlens: one for each thing, with its meaning. Pages, docs and tests take them from here.

Usage: python -m kvlens.text.glossary [--write FILE]. Prints docs/glossary.md, or writes it."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".toml")
TITLES = {"run": "Runs", "method": "Methods", "memory": "Memory", "loss": "Loss and proof", "record": "Record"}
"""section of the file -> its heading on the page"""


@dataclass(frozen=True)
class Entry:
    """One word of the glossary."""

    term: str
    meaning: str
    """one or two plain sentences"""
    section: str
    """a key of TITLES"""


@cache
def entries() -> dict[str, Entry]:
    """Return the entries by term, in the order of the file."""
    sections = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    return {
        term: Entry(term, meaning, section) for section, terms in sections.items() for term, meaning in terms.items()
    }


def meaning(term: str) -> str:
    """Return the meaning of a term. Raises KeyError if the glossary lacks it."""
    return entries()[term].meaning


def page() -> str:
    """Return the text of docs/glossary.md."""
    lines = [
        "# Glossary",
        "",
        "One word for one thing. Names in code, tables, pages and docs use these words.",
        "",
        "This page is made from `kvlens/text/glossary.toml`. Edit that file, then run",
        "`python -m kvlens.text.glossary --write docs/glossary.md`.",
    ]
    for section, title in TITLES.items():
        lines += ["", f"## {title}", "", "| word | meaning |", "| --- | --- |"]
        lines += [f"| {entry.term} | {entry.meaning} |" for entry in entries().values() if entry.section == section]
    return "\n".join([*lines, ""])


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the file to write")
    target = parser.parse_args().write
    if target is None:
        print(page(), end="")
    else:
        target.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
