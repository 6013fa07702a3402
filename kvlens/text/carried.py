"""Carried turns: where in a conversation the cache of its first turn ends, and which replies are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from kvlens.refusal import Refusal

CHOICES = ("anew", "carried")
"""anew: the whole history is read and placed for the last turn. carried: the first turn is read and placed, and all
later tokens are fed to its cache"""
FAULTS = ("nothing_to_carry", "reply_not_found")
"""codes of what a prompt lacks whose turns shall be carried"""
Turn = tuple[str, str]
"""(role, text)"""


def parse_turns(text: str | None) -> bool:
    """Return True for `carried`, False for `anew` and None. Raises Refusal `unknown_turns`."""
    if text is not None and text not in CHOICES:
        raise Refusal(
            f"--turns takes {' or '.join(CHOICES)}, not '{str(text)[:40]}'.", code="unknown_turns", given=text
        )
    return text == "carried"


def has_user_turns(turns: Sequence[Turn]) -> bool:
    """Return True if a conversation with these earlier turns has several user messages."""
    return any(role == "user" for role, _ in turns)


def first_reply(turns: Sequence[Turn]) -> int:
    """Return the place of the first reply among the earlier turns. Raises Refusal `nothing_to_carry` where no user
    message has one."""
    for place in range(1, len(turns)):
        if turns[place][0] == "assistant" and turns[place - 1][0] == "user":
            return place
    raise Refusal(
        "carried turns need a conversation with an earlier user message: give chat messages of two turns or more, or "
        "run with --turns anew.",
        code="nothing_to_carry",
        turns=len(turns),
    )


def reply_start(opening: str, closing: str, turns: Sequence[Turn]) -> int:
    """Return the character of `opening`, the text before the last user message, with which the first reply begins.
    `closing`, the chat form's text behind a user message, tells the first user message from the same words elsewhere.

    Raises Refusal `nothing_to_carry`, or `reply_not_found` where the chat form leaves the reply out."""
    place = first_reply(turns)
    request, reply = turns[place - 1][1].strip(), turns[place][1].strip()
    places = (start + len(request) for start in range(len(opening)) if opening.startswith(request, start))
    shared = {end: _alike(opening[end : end + len(closing)], closing) for end in places}
    end = max(shared, key=lambda place: shared[place], default=-1)
    begin = opening.find(reply, end + shared[end]) if shared and reply else -1
    if begin < 0:
        raise Refusal(
            "the chat form does not hold the first reply as it is, so its turn cannot be carried: give a reply with "
            "words, or run with --turns anew.",
            code="reply_not_found",
        )
    return begin


def _alike(text: str, model: str) -> int:
    """Return the characters with which two texts begin alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, model, strict=False)))


def fill_replies(turns: Sequence[Turn], text: str, reply: Callable[[tuple[Turn, ...], str], str]) -> tuple[Turn, ...]:
    """Return the earlier turns with a reply to each user message that has none. `text` is the last user message.

    Args:
        reply: answers a user message: (the turns before it, the message) -> the reply, stripped.

    Raises Refusal `empty_reply` where a reply has no words."""
    complete: list[Turn] = []
    following = [*turns, ("user", text)][1:]
    for turn, next_turn in zip(turns, following, strict=True):
        if turn[0] == "user" and next_turn[0] == "user":
            answer = reply(tuple(complete), turn[1]).strip()
            if not answer:
                raise Refusal(
                    f"the method answers user message {sum(role == 'user' for role, _ in complete) + 1} with no "
                    "words, so there is no reply to go on from: raise the budget, or give the reply.",
                    code="empty_reply",
                )
            complete += [turn, ("assistant", answer)]
        else:
            complete.append(turn)
    return tuple(complete)
