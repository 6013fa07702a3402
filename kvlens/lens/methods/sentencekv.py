"""What SentenceKV dropped of a sentence when the prompt had been read, before what became of the rest."""

from __future__ import annotations

from kvlens.lens.dropped import dropped
from kvlens.lens.facts import Facts
from kvlens.lens.method_reasons import Told


def told(facts: Facts) -> Told | None:
    """Of a sentence that this KV head keeps in part."""
    removed = dropped(facts)
    if removed is None:
        return None
    unasked = facts.unasked(facts.dropped_at())
    rest = "" if facts.ranking.rank is None else f"; of the sentences kept, {facts.ranking.cut()}"
    if facts.ranking.wanted:
        rest = f"; what was kept of it was read{facts.ranking.words()}"
    return "partly_evicted_unasked" if unasked else "partly_evicted", removed + unasked + rest
