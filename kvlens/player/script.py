"""One script from JavaScript modules that import each other."""

from __future__ import annotations

import re
from pathlib import Path

WEB = Path(__file__).resolve().parent / "web"
"""the player's JavaScript, CSS and HTML"""
_IMPORT = re.compile(r'^import \{[^}]*\} from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default\b)", re.MULTILINE)


def joined(entry: Path) -> str:
    """Return the module `entry` and all modules it imports as one script, each once and after those it imports.

    Imports by name and exports of declarations are removed; `export default` of the entry stays. Names at the top of
    the modules share one scope: tests/unit/test_player_script.py holds that no two are equal."""
    parts: dict[Path, str] = {}
    _collect(entry.resolve(), parts)
    return "\n".join(parts.values())


def modules(entry: Path) -> list[Path]:
    """Return the files of `joined`, in its order."""
    parts: dict[Path, str] = {}
    _collect(entry.resolve(), parts)
    return list(parts)


def _collect(path: Path, parts: dict[Path, str]) -> None:
    source = path.read_text(encoding="utf-8")
    for name in _IMPORT.findall(source):
        imported = (path.parent / name).resolve()
        if imported not in parts:
            _collect(imported, parts)
    parts[path] = _EXPORT.sub("", _IMPORT.sub("", source))
