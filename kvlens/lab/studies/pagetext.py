"""A text of the app that a person reads, and what tells it from the other strings of a source."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TAG = re.compile(r"<[^>]*>")
_WORDS = re.compile(r"[A-Za-z][a-z]+[,:;.)]? +[A-Za-z({«]|[a-z]{2,}[.:?!…]$|[})»] [a-z]{2,}|^[A-Z][a-z]+(?: |$)")
_CODE = re.compile(
    r"[;{}]\s*$|^\s*[.#@]?[\w-]+\s*\{|^[a-z_]+\(|=>|^SELECT |^\(\?|\\[bswd]|px|solid|var\(--|^\w+(\.\w+)+$"
)
_NAMES = re.compile(
    r"^[\w/.«»-]+\.(py|json|csv|html|parquet|svg|png|js)$|^[a-z]+(_[a-z]+)+$|^(Cividis|RdBu|top|bottom|middle)\b.{0,8}$"
    r"|^[lm]\*?(ines|arkers)|^utf-8|^(Escape|Enter|Home|End|Shift|Space|Arrow\w+)$|^[A-Z][a-z]+:$"
)
"""texts that are names of files, codes, colours and keys"""


@dataclass(frozen=True)
class PageText:
    """A text on a page."""

    file: str
    """path in the repository"""
    line: int
    kind: str
    """title, caption, label, tooltip, placeholder, button, notice, error or sentence"""
    text: str
    """placeholders stand in angle quotes"""


def shown(text: str) -> str:
    """Return a string of a source as a page shows it: in one line, without tags."""
    return " ".join(_TAG.sub(" ", text).split())


def is_read(text: str, kind: str) -> bool:
    """Return True unless a string is code, a name or a figure."""
    bare = re.sub(r"«[^»]*»", "", text).strip()
    if _NAMES.search(text):
        return False
    if not re.search(r"[A-Za-z]{2}", bare) or _CODE.search(text) or text.startswith(("http", "/", "--", ":material")):
        return False
    return bool(_WORDS.search(text)) if kind in ("sentence", "label") else True


def is_code(text: str) -> bool:
    """Return True for a string of code or style."""
    return bool(_CODE.search(text))
