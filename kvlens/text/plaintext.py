"""Text from elsewhere (a model's output, a trace, a prompt, a file's name) on its way to a reader: `visible` on pages
and in reports, `terminal` and `json_text` on a terminal. CSV has its own rule, ``kvlens.store.export.csv_cells``.

What such text may hold beside letters: escape sequences, which move a terminal's cursor or set its title; characters
that reverse the direction of what follows (U+202E and its kin: 'exe.txt' reads 'txt.exe'); separators that end a line
for some programs and not for others. All of these are made visible as ⟨U+202E⟩; nothing is dropped.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

#: Controls except tab and line feed; line and paragraph separators; embeddings, overrides and isolates of direction;
#: lone surrogates, which no output can hold.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: object) -> str:
    """`text` with every unseen character named. Line feeds and tabs stay."""
    return _UNSEEN.sub(lambda results: f"⟨U+{ord(results.group()):04X}⟩", str(text).replace("\r\n", "\n"))


def terminal(text: object, indent: int = 0) -> str:
    """`text` for a terminal: later lines begin `indent` columns in, so that none can pass for a line of its own."""
    return visible(text).replace("\n", "\n" + " " * indent)


def finite(value: Any) -> Any:
    """Return a value with null for every number in it that JSON does not have: NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def strict_json(value: Any, **form: Any) -> str:
    """Return JSON that every reader takes, letters as they are. form: keywords of json.dumps."""
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False, **form)


def json_text(value: Any) -> str:
    r"""JSON for a terminal and for programs alike: unseen characters, which can only stand in strings, as \uXXXX."""
    return _UNSEEN.sub(lambda results: f"\\u{ord(results.group()):04x}", strict_json(value))
