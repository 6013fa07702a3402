"""The catalogue of what pages say: every title, caption, label, tooltip, empty state, error and button of the app, page
by page, for a reviewer to read in one sitting.

Usage: python -m kvlens.lab.studies.page_strings [--write docs/page-strings.md]. It prints the texts that break a rule
of language. A text is changed in the file that the catalogue names, and nowhere else."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from kvlens.lab.studies.pagetext import PageText
from kvlens.lab.studies.pythontexts import texts_of_python
from kvlens.lab.studies.webtexts import texts_of_html, texts_of_script

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("kvlens/app", "kvlens/player")
SECTIONS = {
    "home": "Runs",
    "gallery": "Runs",
    "run": "New run",
    "race": "New run",
    "study": "Study",
    "replay": "Replay",
    "player": "Replay",
    "heads": "Heads",
    "spans": "Spans",
    "method": "Method",
    "methods": "Method",
    "memory": "Memory",
    "compare": "Compare",
    "benchmarks": "Benchmarks",
    "ownmethod": "Own method",
    "own_method": "Own method",
    "report": "Reports",
    "figures": "Figures of several pages",
}
"""folder or module of the app -> section of the catalogue; whatever is in none is of several pages"""
SEVERAL = "Several pages"
READERS = {".py": texts_of_python, ".js": texts_of_script, ".html": texts_of_html}
"""ending of a source -> what finds its texts"""
ORDER = tuple(dict.fromkeys([*SECTIONS.values(), SEVERAL]))
MOST_WORDS = 25
"""words of a sentence"""
PHRASE = 5
"""words of a text that is listed among the words of a section, not as a row"""
_END = re.compile(r"(?<=[.!?])[\"')*]*(?: +(?=[\"'(*«“A-Z●★–])|(?=«))")
_WORD = re.compile(r"«[^»]*»|[A-Za-z0-9][\w'’%.,/-]*")
_FLAG = re.compile(r"(?<![\w-])--[a-z]")


def catalogue(root: Path = ROOT) -> dict[str, list[PageText]]:
    """Return the texts of every section, in the order of their files and lines."""
    sections: dict[str, list[PageText]] = {name: [] for name in ORDER}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in READERS and "commands" not in path.parts:
                source, file = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
                sections[section_of(path.relative_to(root / "kvlens"))] += READERS[path.suffix](source, file)
    return sections


def section_of(path: Path) -> str:
    """Return the section of a source file, by the innermost folder or module that has one."""
    names = [*path.parts[:-1], path.stem] if path.parts[:2] == ("app", "pages") else path.parts[:-1]
    return next((SECTIONS[name] for name in reversed(names) if name in SECTIONS), SEVERAL)


def faults(texts: Iterable[PageText]) -> Iterator[tuple[PageText, str]]:
    """Yield each text that breaks a rule, with the rule: a sentence of more than 25 words, an option of the command
    line."""
    for item in texts:
        longest = max((len(_WORD.findall(sentence)) for sentence in _END.split(item.text)), default=0)
        if longest > MOST_WORDS:
            yield item, f"{longest} words in a sentence"
        if _FLAG.search(item.text):
            yield item, "an option of the command line"


def page(sections: dict[str, list[PageText]]) -> str:
    """Return docs/page-strings.md."""
    parts = [
        "# What pages say\n",
        "This catalogue has every text of the app, page by page. Short words of tables and figures follow each page. "
        "«name» stands for a value.\n",
        "Change a text in the file that the catalogue names, then make the catalogue again:\n",
        "```\npython -m kvlens.lab.studies.page_strings --write docs/page-strings.md\n```\n",
        f"A test fails while the catalogue lacks a text. It also refuses a sentence of more than {MOST_WORDS} words "
        "and an option of the command line.\n",
        "Pages share some sentences with the command line. They are in `kvlens/lens/` and beside the errors.\n",
        "<!-- generated: begin -->\n",
    ]
    for name, texts in sections.items():
        parts.append(f"## {name}\n")
        for file, items in groupby(_rows(texts), key=lambda item: item.file):
            parts.append(f"### `{file}`\n")
            parts.append("| line | what | text |\n| ---: | --- | --- |")
            parts.append("\n".join(f"| {item.line} | {item.kind} | {_cell(item.text)} |" for item in items) + "\n")
        if phrases := _phrases(texts):
            parts.append("Words: " + " · ".join(map(_cell, phrases)) + "\n")
    return "\n".join([*parts, "<!-- generated: end -->"]) + "\n"


def _rows(texts: Sequence[PageText]) -> list[PageText]:
    """The texts that have a row of their own, each once in its file."""
    rows: dict[tuple[str, str], PageText] = {}
    for item in texts:
        if not _is_phrase(item):
            rows.setdefault((item.file, item.text), item)
    return list(rows.values())


def _phrases(texts: Sequence[PageText]) -> list[str]:
    return list(dict.fromkeys(item.text for item in texts if _is_phrase(item)))


def _is_phrase(item: PageText) -> bool:
    """Return True for a few words of a table, a legend or an axis."""
    is_part = item.kind in ("sentence", "label", "title") and not item.text.endswith((".", "?", "!"))
    return is_part and len(item.text.split()) <= PHRASE


def _cell(text: str) -> str:
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", text)


def without_lines(text: str) -> str:
    """Return the page without line numbers, which move with every change of a source."""
    return re.sub(r"^\| \d+ \|", "| |", text, flags=re.MULTILINE)


def main() -> None:
    """Write the page, or print what breaks the rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the page to write")
    target = parser.parse_args().write
    sections = catalogue()
    if target is not None:
        target.write_text(page(sections), encoding="utf-8")
    for texts in sections.values():
        for item, rule in faults(texts):
            print(f"{item.file}:{item.line}: {rule}: {item.text}")


if __name__ == "__main__":
    main()
