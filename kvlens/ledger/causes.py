"""The causes that a lost lead is split into, and what each means. No torch."""

from __future__ import annotations

CAUSES: dict[str, tuple[str, str]] = {
    "not_asked": ("not asked", "routing: the step's query did not choose the span"),
    "refused": ("asked and refused", "room: the query chose the span, and the budget had no room for it"),
    "precision": ("rank or bits", "precision: the span was read through factors, few bits or a summary"),
    "stale": ("stale", "an earlier step's query chose what this step read"),
    "evicted_before": ("evicted before the question", "the tokens were gone before the question was known"),
    "evicted_after": ("evicted after the question", "the tokens were dropped after the question was known"),
}
"""code -> (name on pages, what it means), in the order of the bar"""
REST = "rest"
REST_NAME = "rest"
NAMES: dict[str, str] = {code: name for code, (name, _) in CAUSES.items()} | {REST: REST_NAME}
"""code -> name on pages, the rest last"""
NONE = -1
"""index of a span that needs no repair"""
INDEX: dict[str, int] = {code: index for index, code in enumerate(CAUSES)}
CODES: tuple[str, ...] = tuple(CAUSES)
