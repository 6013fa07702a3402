"""A replay file taken apart: its policy, its tags, its trace."""

from __future__ import annotations

import base64
import struct
import zlib
from html.parser import HTMLParser
from typing import Any

from kvlens.player.codec import unpack

LINKS = ("src", "href", "action", "data", "poster", "srcset", "formaction", "ping", "background", "manifest")
"""attributes by which a page fetches something or leads elsewhere"""


class ReplayFile(HTMLParser):
    """The parts of a replay file that could fetch or run something, and its data."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.tags: list[str] = []
        self.policy = ""
        self.sources: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        """tag -> the text of each element"""
        self._types: list[str | None] = []
        self._inside = ""
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.tags.append(tag)
        self._inside = tag
        self.links += [str(value) for name, value in attributes if name in LINKS]
        self.handlers += [name for name in values if name.startswith("on")]
        if tag in self.sources:
            self.sources[tag].append("")
        if tag == "script":
            self._types.append(values.get("type"))
        if tag == "meta" and values.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(values["content"])

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.sources:
            self.sources[self._inside][-1] += data

    @property
    def code(self) -> str:
        """The one script that runs."""
        (code,) = [source for source, kind in zip(self.sources["script"], self._types, strict=True) if kind == "module"]
        return code

    def messages(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (header, arrays) of the run and of every query head in the file."""
        (text,) = [source for source, kind in zip(self.sources["script"], self._types, strict=True) if kind != "module"]
        stream = zlib.decompress(base64.b64decode(text))
        found, offset = [], 0
        while offset < len(stream):
            (length,) = struct.unpack_from("<I", stream, offset)
            found.append(unpack(stream[offset + 4 : offset + 4 + length]))
            offset += 4 + length
        return found
