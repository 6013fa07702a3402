"""How lists of runs show an outcome."""

from __future__ import annotations

from collections.abc import Sequence


def outcome_label(words: str, kinds: Sequence[str]) -> str:
    """Return the words of an outcome behind the kind that it is looked for by, where the run left full KV: 'Lost, wrong
    answer', 'Diverged, right answer', 'right answer'. kinds: of kvlens.lens.severity.KINDS."""
    kind = next((kind for kind in ("lost", "diverged") if kind in kinds), "")
    return f"{kind.capitalize()}, {words}" if kind else words
