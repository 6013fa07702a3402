"""Text on its way to a reader: of tokens, and from elsewhere (a model's output, a trace, a prompt, a file's name).

A character may take several tokens. The token that completes a character shows it; the tokens before show nothing, so
that the texts of tokens join to the text itself.

Text from elsewhere passes `visible` on pages and in reports, `terminal` and `json_text` on a terminal. CSV has its own
rule, ``kvlens.store.export.csv_cells``.

What such text may hold beside letters: escape sequences, which move a terminal's cursor or set its title; characters
that reverse the direction of what follows (U+202E and its kin: 'exe.txt' reads 'txt.exe'); separators that end a line
for some programs and not for others. All of these are made visible as ⟨U+202E⟩; nothing is dropped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
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


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: NumPy scalars and arrays, paths, sets become plain; not-finite floats become
    null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    return clean_text(str(value))


def clean_text(text: str) -> str:
    """`text` with lone surrogates replaced: neither UTF-8 nor DuckDB can hold them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def strict_json(value: Any, **form: Any) -> str:
    """Return JSON that every reader takes, letters as they are. form: keywords of json.dumps."""
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False, **form)


def json_text(value: Any) -> str:
    r"""JSON for a terminal and for programs alike: unseen characters, which can only stand in strings, as \uXXXX."""
    return _UNSEEN.sub(lambda results: f"\\u{ord(results.group()):04x}", strict_json(value))


UNREADABLE = "\ufffd"
MOST_BYTES = 4
"""of a character in UTF-8: a part that is longer is no part of a character"""


def prompt_pieces(
    text: str, ids: Sequence[int], ranges: Sequence[tuple[int, int]], decode: Callable[[list[int]], str]
) -> tuple[str, ...]:
    """Return the text of each prompt token. ranges: characters [start, end) of `text` that a token touches; an empty
    range belongs to a token that is not of the text, which is decoded."""
    pieces, shown = [], 0
    for token, (start, end), following in zip(ids, ranges, _following(ranges), strict=True):
        if end <= start:
            pieces.append(decode([token]))
            continue
        complete = end if following is None else min(end, max(start, following))
        pieces.append(text[max(start, shown) : complete])
        shown = max(shown, complete)
    return tuple(pieces)


def _following(ranges: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return, for each token, the start of the next range that is not empty; None behind the last."""
    starts: list[int | None] = []
    following = None
    for start, end in reversed(ranges):
        starts.append(following)
        following = start if end > start else following
    return starts[::-1]


class TokenStream:
    """The texts of tokens as they are generated, one after the other."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._pending: list[int] = []

    def text(self, token: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        self._pending.append(token)
        text = self._decode(self._pending)
        if text.endswith(UNREADABLE) and len(self._pending) < MOST_BYTES:
            return ""
        self._pending.clear()
        return text


def token_text(tokenizer: Any, token: int) -> str:
    r"""Return the text of one token alone. A part of a character is written as its bytes: `\xe4\xbb`."""
    text = str(tokenizer.decode([token]))
    if UNREADABLE not in text:
        return text
    name = tokenizer.convert_ids_to_tokens(token)
    stored = _bytes_of(name) if isinstance(name, str) else None
    return text if stored is None else stored.decode("utf-8", "backslashreplace")


def _bytes_of(name: str) -> bytes | None:
    """Return the bytes of a token by its name in a vocabulary of bytes: GPT-2's letters or SentencePiece's <0xNN>."""
    if name.startswith("<0x") and name.endswith(">") and len(name) == 6:
        return bytes([int(name[3:5], 16)])
    letters = _letters()
    return bytes(letters[letter] for letter in name) if all(letter in letters for letter in name) else None


def _letters() -> dict[str, int]:
    """GPT-2's letter -> the byte that it stands for."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(rest)}
