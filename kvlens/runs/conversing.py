"""A conversation run turn by turn: each user message without a reply is answered by a run of its own."""

from __future__ import annotations

from collections.abc import Callable

from kvlens.runs.request import RunRequest
from kvlens.text.carried import Turn, fill_replies
from kvlens.text.prompts import PromptText

Outcome = tuple[str, str, str]
"""(uid, status, output text) of a stored run"""


class _TurnCancelled(Exception):
    """A turn was cancelled: those behind it have no reply to go on from."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def answer_turns(
    request: RunRequest, source: PromptText, carry_out: Callable[[RunRequest, PromptText], Outcome]
) -> tuple[RunRequest, Outcome | None]:
    """Return the request of the last turn, with a reply to each earlier user message: the given one, or what the method
    answers in a stored run of that turn. A carried turn is fed the replies before it. Each turn's run places the first
    turn for its own budget, so two runs keep the same tokens of it only where parameters fix their number.

    The second value is the outcome of a turn that was cancelled, behind which none is run; None where all ended.

    Raises Refusal `empty_reply`, and what `carry_out` raises."""

    def reply(turns: tuple[Turn, ...], text: str) -> str:
        changes = {"turns": turns, "carried": request.carried and bool(turns), "question": "in"}
        outcome = carry_out(request.model_copy(update=changes), PromptText(text))
        if outcome[1] != "completed":
            raise _TurnCancelled(outcome)
        return outcome[2]

    try:
        turns = fill_replies(request.turns, source.text, reply)
    except _TurnCancelled as stopped:
        return request, stopped.outcome
    return request.model_copy(update={"turns": turns}), None
