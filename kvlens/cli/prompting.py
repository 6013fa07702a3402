"""The prompt that a command is given: a file or standard input; and the options that describe it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlens.refusal import Refusal
from kvlens.text.messages import Conversation, read_conversation
from kvlens.text.promptfiles import decode, read_prompt
from kvlens.text.prompts import PromptText, checked

Segment = Annotated[
    list[str] | None,
    typer.Option(
        help="A named part of the prompt: NAME=MARKER (its first words) or NAME=START:END (characters); "
        "may be repeated."
    ),
]
ChatArg = Annotated[
    list[str] | None,
    typer.Option(help="For the chat template: NAME=VALUE, such as enable_thinking=false; may be repeated."),
]


Turns = Annotated[
    str | None,
    typer.Option(
        help="Of chat messages with several turns, carried or anew, as for `run`. User messages without a reply stay "
        "as they are."
    ),
]


def conversation_in(file: str) -> Conversation:
    """A checked prompt with the turns before it. file: as for `prompt_in`; a .json file may have "messages"."""
    return Conversation(prompt_in(file), None, ()) if file == "-" else read_conversation(Path(file))


def system_of(talk: Conversation, system: str | None) -> str | None:
    """Return the system message of a conversation, or `system`, that of the command line. Raises Refusal
    `system_twice` for both."""
    if talk.system is not None and system is not None:
        raise Refusal("the messages begin with a system message: leave out --system.", code="system_twice")
    return talk.system if system is None else system


def prompt_in(file: str) -> PromptText:
    """A checked prompt. file: a path, or - for standard input. Raises ValueError with one sentence."""
    if file == "-":
        return checked(decode(sys.stdin.buffer.read(), "standard input"), file)
    return read_prompt(Path(file))
