"""Texts of the app's scripts and HTML that a person reads."""

from __future__ import annotations

import re

from kvlens.lab.studies.pagetext import PageText, is_code, is_read, shown

_SCRIPT = re.compile(r'"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`')
_SLOT = re.compile(r"\$\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")


def texts_of_script(source: str, file: str) -> list[PageText]:
    """Return the texts of a script, in order."""
    results = []
    for number, row in enumerate(source.splitlines(), 1):
        for quoted, template in _SCRIPT.findall(row.partition(" //")[0]):
            text = shown(_SLOT.sub(_slot, quoted or template))
            if "import " not in row and is_read(text, "sentence"):
                results.append(PageText(file, number, "sentence", text))
    return results


def texts_of_html(source: str, file: str) -> list[PageText]:
    """Return the words and hover titles of an HTML part, in order."""
    results = []
    for number, row in enumerate(source.splitlines(), 1):
        for title in re.findall(r'(?:title|aria-label)="([^"]*)"', row):
            results.append(PageText(file, number, "tooltip", title))
        text = shown(row)
        if re.search(r"[A-Za-z]{2}", text) and not is_code(text) and "<" not in text:
            results.append(PageText(file, number, "label", text))
    return [item for item in results if " " in item.text or item.text[:1].isupper()]


def _slot(match: re.Match[str]) -> str:
    names = re.findall(r"[A-Za-z_]\w*", re.sub(r"\"[^\"]*\"", "", match[1]))
    choices = re.findall(r"\"([^\"]*)\"", match[1])
    return "«" + ("|".join(choices) if choices else names[-1] if names else "…") + "»"
