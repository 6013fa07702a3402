"""Texts for haystacks that lie beside this file: real prose, the same on every machine, held to its hash.

What methods are measured on and what they are calibrated on are different texts (corpus/README.md says where from).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Text:
    """One file: a sentence a line, an empty line between paragraphs."""

    file: str
    title: str
    sha256: str


EVALUATION = Text(
    "workshop.txt",
    "Workshop on Electronic Texts: Proceedings (Library of Congress, 1992)",
    "1e70d4aca52756353762a6be656a49ce141b368cbc04881a3eaf60635ae26542",
)
"""what methods are measured on"""
CALIBRATION = Text(
    "alice.txt",
    "Lewis Carroll, Alice's Adventures in Wonderland (1865)",
    "e418b36a39febb89bb03da89f052177eaf3c816367e3d9d23c440d342fd545b8",
)
"""what methods are calibrated and trained on"""


@cache
def paragraphs(text: Text = EVALUATION) -> tuple[tuple[str, ...], ...]:
    """Sentences by paragraph, in reading order. Raises ValueError when the file is not what it was."""
    try:
        data = (CORPUS / text.file).read_bytes().replace(b"\r\n", b"\n")
    except OSError as error:
        raise ValueError(
            f"the text '{text.file}' of kvlens cannot be read ({error.strerror}): install it again."
        ) from None
    if hashlib.sha256(data).hexdigest() != text.sha256:
        raise ValueError(f"the text '{text.file}' of kvlens was changed, so prompts would differ: restore the file.")
    return tuple(tuple(part.splitlines()) for part in data.decode("ascii").split("\n\n"))


@cache
def sentences(text: Text = EVALUATION) -> tuple[str, ...]:
    """All sentences in reading order."""
    return tuple(sentence for paragraph in paragraphs(text) for sentence in paragraph)
