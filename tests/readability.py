"""How hard the docs are to read: words per sentence and the Flesch-Kincaid grade of prose outside docs/evidence/.

Prose is what a page says in paragraphs and lists. Code, tables, headings, quotations and generated blocks do not
count. Grade = 0.39 words per sentence + 11.8 syllables per word - 15.59 (Kincaid et al. 1975). `python
tests/readability.py` prints a row per page, with `--worst N` the N longest sentences of each page."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEAN_WORDS, MOST_WORDS, GRADE = 17.0, 35, 11.0
ABBREVIATIONS = re.compile(r"\b(?:e\.g|i\.e|et al|sec|eq|app|fig|vs|cf|No)\.", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*|\d[\d.,:%]*")


@dataclass(frozen=True)
class Measure:
    """Counts over the sentences of a page."""

    sentences: int
    words: int
    syllables: int
    longest: int

    @property
    def mean(self) -> float:
        """Words per sentence."""
        return self.words / max(self.sentences, 1)

    @property
    def grade(self) -> float:
        """The Flesch-Kincaid grade: years of school that a reader needs."""
        return 0.39 * self.mean + 11.8 * self.syllables / max(self.words, 1) - 15.59


def prose_blocks(text: str) -> list[str]:
    """Return the paragraphs and list items of a markdown page as one line each."""
    text = re.sub(r"^(```|~~~).*?^\1 *$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- ([\w ]+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!-- generated.*?: begin -->.*?<!-- generated: end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    blocks: list[str] = []
    fresh = True
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith(("|", "#", ">", "![", "---", "===")):
            fresh = True
            continue
        item = re.match(r"(?:[-*+]|\d+\.) +", bare)
        if fresh or item or line.startswith("    "):
            blocks.append(bare[item.end() :] if item else bare)
        else:
            blocks[-1] += " " + bare
        fresh = False
    return blocks


def plain(block: str) -> str:
    """Return the words of a block as a reader sees them: a link's text, and one word for a piece of code."""
    block = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
    block = re.sub(r"`[^`]*`", "code", block)
    block = ABBREVIATIONS.sub(lambda match: match.group().replace(".", ""), block)
    return re.sub(r"[*_]", "", block)


def sentences(text: str) -> list[str]:
    """Return the sentences of a page. A colon before a list and a semicolon end none."""
    parts = (
        part
        for block in prose_blocks(text)
        for part in re.split(r"(?<=[.!?])[\"')]* +(?=[\"'(A-Z0-9]|code\b|kvlens\b)", plain(block))
    )
    return [part for part in parts if WORD.search(part)]


def count_syllables(word: str) -> int:
    """Return the syllables of an English word: its groups of vowels, but for a silent e. A number counts as one."""
    letters = re.sub(r"[^a-z]", "", word.lower())
    if not letters:
        return 1
    groups = len(re.findall(r"[aeiouy]+", letters))
    if re.search(r"[^aeiouyl]e$|[^aeiouytd]ed$|[^aeiouyszxcgh]es$", letters) and groups > 1:
        groups -= 1
    return max(groups, 1)


def measure(text: str) -> Measure:
    """Return the counts of a page's prose."""
    lists = [WORD.findall(sentence) for sentence in sentences(text)]
    words = [word for words in lists for word in words]
    return Measure(
        len(lists),
        len(words),
        sum(count_syllables(word) for word in words),
        max((len(words) for words in lists), default=0),
    )


def pages(root: Path = ROOT) -> list[Path]:
    """Return README, CONTRIBUTING and every page of docs/ outside docs/evidence/."""
    docs = sorted(path for path in (root / "docs").rglob("*.md") if "evidence" not in path.relative_to(root).parts)
    return [root / "README.md", root / "CONTRIBUTING.md", *docs]


def is_hard(measured: Measure) -> bool:
    """Return True if a page passes one of the three bounds."""
    return measured.mean > MEAN_WORDS or measured.longest > MOST_WORDS or measured.grade > GRADE


def main() -> int:
    """Print a row per page; return 1 if a page is hard to read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worst", type=int, default=0, help="longest sentences to print for each page")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    hard = 0
    for path in options.files or pages():
        text = path.read_text(encoding="utf-8")
        row = measure(text)
        hard += is_hard(row)
        mark = "HARD" if is_hard(row) else ""
        figures = f"mean {row.mean:.1f}, longest {row.longest}, grade {row.grade:.1f}"
        print(f"{path}: {row.sentences} sentences, {figures} {mark}")
        for sentence in sorted(sentences(text), key=lambda part: -len(WORD.findall(part)))[: options.worst]:
            print(f"    {len(WORD.findall(sentence))}: {sentence}")
    return 1 if hard else 0


if __name__ == "__main__":
    sys.exit(main())
