"""A conversation run turn by turn: each user message without a reply is answered by a run of its own."""

from __future__ import annotations

from collections.abc import Callable

from kvlens.refusal import Refusal
from kvlens.runs.request import RunRequest
from kvlens.text.carried import Turn, fill_replies
from kvlens.text.prompts import PromptText

CarryOut = Callable[[RunRequest, PromptText], tuple[str, str, str]]
"""carries out a run -> (uid, status, output text)"""


def answer_turns(request: RunRequest, source: PromptText, carry_out: CarryOut) -> RunRequest:
    """Return the request of the last turn, with a reply to each earlier user message: the given one, or what the method
    answers in a stored run of that turn. A carried turn is fed the replies before it, so its cache holds what the cache
    of the turns before held.

    Raises Refusal `empty_reply`, or `cancelled` where a turn was cancelled, and what `carry_out` raises."""

    def reply(turns: tuple[Turn, ...], text: str) -> str:
        of_turn = request.model_copy(update={"turns": turns, "carried": request.carried and bool(turns)})
        uid, status, output = carry_out(of_turn, PromptText(text))
        if status != "completed":
            raise Refusal(f"the turn of run {uid} was cancelled, so the turns behind it cannot run.", code="cancelled")
        return output

    return request.model_copy(update={"turns": fill_replies(request.turns, source.text, reply)})
