"""Where each span lay for one KV head at one step, replayed from the events up to that step."""

from __future__ import annotations

from collections.abc import Iterable

_MOVES = {"recall": "resident", "prefetch": "resident", "correction": "resident", "offload": "cold", "evict": "evicted"}


def replay(spans: Iterable[tuple[int, str, str | None]], events: Iterable[tuple[int, str, int | None]]) -> dict[int, str]:
    """State per span. `spans`: (span, state at birth, form in the cold tier); `events`: (span, kind, query head) in order.

    A zoom lasts until every query head that asked for it has let go; an event without a query head speaks for all of them. A span
    that comes from the cold tier is resident when it lay there raw and reconstructed when it lay there as factors. An offload is
    news only for a span that was resident: one with a summary stays coarse.
    """
    state: dict[int, str] = {}
    form: dict[int, str | None] = {}
    for span, birth, how in spans:
        state[span], form[span] = birth, how
    before: dict[int, str] = {}
    holders: dict[int, set[int | None]] = {}
    for span, kind, q_head in events:
        if span not in state:
            continue
        if kind == "zoom_in":
            if span not in before:
                before[span], holders[span] = state[span], set()
            holders[span].add(q_head)
            state[span] = "reconstructed" if form[span] == "factors" else "resident"
        elif kind == "zoom_out":
            if span not in before:
                continue
            holders[span].discard(q_head)
            if q_head is None or not holders[span]:
                state[span] = before.pop(span)
        elif kind == "offload":
            before.pop(span, None)
            if state[span] in ("resident", "reconstructed"):
                state[span] = "cold"
        else:
            before.pop(span, None)
            state[span] = _MOVES[kind]
    return state
