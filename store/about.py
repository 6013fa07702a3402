"""``runs/<uid>/about.json``: what somebody calls a run and says of it. No part of what was recorded: the run never
reads it, and it may be written at any time, also while the run goes on."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kvlens.files import read_plain, replace_plain
from kvlens.store.errors import TraceError, UnreadableRun, sentence
from kvlens.store.runinfo import run_dir
from kvlens.text.plaintext import clean_text, visible

FILE = "about.json"
NAME, NOTE, TAG, TAGS = 80, 2_000, 32, 16
"""characters of a name, of a note and of a tag, and tags, at most"""
_MOST_BYTES = 64 << 10


def _shown(text: str) -> str:
    if visible(text) != text:
        raise ValueError("it has characters that are not seen, or that turn text round")
    return text


Tag = Annotated[str, Field(min_length=1, max_length=TAG), AfterValidator(_shown)]


class About(BaseModel):
    """A run's name, note and tags; all empty where nobody has said anything."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(max_length=NAME), AfterValidator(_shown)] = ""
    note: Annotated[str, Field(max_length=NOTE), AfterValidator(_shown)] = ""
    tags: Annotated[tuple[Tag, ...], Field(max_length=TAGS)] = ()
    """in the order in which they were given"""


def read_about(folder: Path) -> About:
    """What is said of the run in `folder`. Raises UnreadableRun, one sentence, for a file that is not what
    `write_about` writes."""
    try:
        return About.model_validate_json(read_plain(folder / FILE, _MOST_BYTES))
    except FileNotFoundError:
        return About()
    except ValidationError as error:
        head_item = error.errors()[0]
        why = ": ".join(part for part in (".".join(map(str, head_item["loc"])), str(head_item["msg"])) if part)
    except OSError as error:
        why = sentence(error)
    raise UnreadableRun(
        f"{FILE} of run {folder.name}, its name, note and tags, cannot be read ({why}); mend that file or delete it.",
        code="about_unreadable",
    )


def write_about(runs_dir: Path, uid: str, about: About) -> None:
    """Replaces what is said of a run, whole. Raises TraceError with one sentence."""
    folder = run_dir(runs_dir, uid)
    target, temporary = folder / FILE, folder / f".{FILE}.{os.getpid()}.{secrets.token_hex(4)}"  # of threads too
    try:
        if about == About():
            target.unlink(missing_ok=True)
            return
        replace_plain(target, temporary, about.model_dump_json(indent=1).encode(), durable=True)
    except OSError as error:
        raise TraceError(
            f"The name, note and tags of run {uid} cannot be stored ({error.strerror or sentence(error)}); check the "
            "disk and that the runs folder can be written."
        ) from error


def change_about(
    about: About, name: str | None = None, note: str | None = None, tags: Iterable[str] = (), untags: Iterable[str] = ()
) -> About:
    """`about` with another name or note (None: as it is), with `tags` and without `untags`. Raises ValueError with one
    sentence for what is too long, an empty tag and a tag to take away that is not there."""
    called = about.name if name is None else _line(name)
    noted = about.note if note is None else visible(clean_text(note)).strip()
    kept_tokens = dict.fromkeys(about.tags)
    for tag in map(_line, untags):
        if tag not in kept_tokens:
            raise ValueError(f"the run has no tag '{tag}' to take away; it has {', '.join(kept_tokens) or 'none'}.")
        del kept_tokens[tag]
    kept_tokens |= dict.fromkeys(map(_line, tags))
    if "" in kept_tokens:
        raise ValueError("a tag needs at least one character.")
    for subject, text, most in (
        ("name", called, NAME),
        ("note", noted, NOTE),
        *(("tag", tag, TAG) for tag in kept_tokens),
    ):
        if len(text) > most:
            raise ValueError(f"a {subject} has at most {most:,} characters, this one {len(text):,}.")
    if len(kept_tokens) > TAGS:
        raise ValueError(f"a run has at most {TAGS} tags, these are {len(kept_tokens)}.")
    return About(name=called, note=noted, tags=tuple(kept_tokens))


def _line(text: str) -> str:
    return visible(" ".join(clean_text(text).split()))
