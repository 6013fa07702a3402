"""Where each span lay for one KV head, replayed from the events."""

from __future__ import annotations

from collections.abc import Iterable

_ARRIVALS = ("recall", "prefetch", "correction")
_MOVES = {
    "evict": "evicted",
    "release": "cold",
    "thin": "partial",
    "kept": "resident",
    "part": "partly_recalled",
    "rewrite": "rewritten",
}


class Replay:
    """The states of spans, changed by one event after the other.

    A zoom lasts until every query head that asked for it has let go; an event without a query head speaks for all of
    them. A span that is zoomed into or recalled is resident when it lay in the cold tier raw and reconstructed when it
    lay there as factors; the event `part` behind a recall says that only some of its tokens came. An offload is news
    only for a span that was hot: one with a summary stays coarse. Of a partial span the tokens that are gone stay gone:
    only evicting the others changes it, or the word that this KV head has lost none of them. A span that a
    counterfactual holds stays resident, whatever the method does with its own copy.
    """

    def __init__(self, spans: Iterable[tuple[int, str, str | None]]) -> None:
        """`spans`: (span, state at birth, form in the cold tier)."""
        self.state: dict[int, str] = {}
        self._form: dict[int, str | None] = {}
        for span, birth, form in spans:
            self.state[span], self._form[span] = birth, form
        self._before: dict[int, str] = {}
        self._holders: dict[int, set[int | None]] = {}
        self._held: set[int] = set()

    def apply(self, span: int, kind: str, q_head: int | None) -> None:
        """One event; spans this replay does not know are ignored."""
        if kind == "hold" and span in self.state:
            self._held.add(span)
            self.state[span] = "resident"
        if (
            span not in self.state
            or span in self._held
            or (self.state[span] == "partial" and kind not in ("evict", "kept"))
        ):
            return
        if kind == "zoom_in":
            self._zoom_in(span, q_head)
        elif kind == "zoom_out":
            self._zoom_out(span, q_head)
        elif kind == "offload":
            self._before.pop(span, None)
            if self.state[span] in ("resident", "reconstructed", "partly_recalled", "rewritten"):
                self.state[span] = "cold"
        elif kind in _ARRIVALS or kind in _MOVES:
            self._before.pop(span, None)
            self.state[span] = self._arrived(span) if kind in _ARRIVALS else _MOVES[kind]

    def _zoom_in(self, span: int, q_head: int | None) -> None:
        if span not in self._before:
            self._before[span], self._holders[span] = self.state[span], set()
        self._holders[span].add(q_head)
        self.state[span] = self._arrived(span)

    def _arrived(self, span: int) -> str:
        return "reconstructed" if self._form[span] == "factors" else "resident"

    def _zoom_out(self, span: int, q_head: int | None) -> None:
        if span not in self._before:
            return
        self._holders[span].discard(q_head)
        if q_head is None or not self._holders[span]:
            self.state[span] = self._before.pop(span)


def replay(
    spans: Iterable[tuple[int, str, str | None]], events: Iterable[tuple[int, str, int | None]]
) -> dict[int, str]:
    """State per span after all `events` (span, kind, query head), in order."""
    machine = Replay(spans)
    for span, kind, q_head in events:
        machine.apply(span, kind, q_head)
    return machine.state


def changes(
    spans: Iterable[tuple[int, str, str | None, int]], events: Iterable[tuple[int, int, str, int | None]]
) -> list[tuple[int, int, str]]:
    """(step, span, state) whenever a span lay elsewhere while a step attended than at the step before, and once at each
    span's birth.

    `spans`: (span, state at birth, form, birth step); `events`: (first step that attends under it, span, kind, query
    head), in order.
    """
    known_values = list(spans)
    machine = Replay((span, birth, form) for span, birth, form, _ in known_values)
    last = {span: birth for span, birth, _, _ in known_values}
    rows = [(born, span, birth) for span, birth, _, born in known_values]
    touched: set[int] = set()
    current: int | None = None

    def close(step: int | None) -> None:
        for span in sorted(touched):
            if step is not None and machine.state[span] != last[span]:
                last[span] = machine.state[span]
                rows.append((step, span, last[span]))
        touched.clear()

    for step, span, kind, q_head in events:
        if step != current:
            close(current)
            current = step
        if span in machine.state:
            touched.add(span)
            machine.apply(span, kind, q_head)
    close(current)
    merged = {(step, span): state for step, span, state in rows}  # a change in the step of birth replaces the birth
    return sorted((step, span, state) for (step, span), state in merged.items())
