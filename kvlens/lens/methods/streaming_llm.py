"""Why a span that was attended whole got less than full attention gives it: the sinks were seen from nearer (sec.
3.2)."""

from __future__ import annotations

from kvlens.lens.facts import Facts
from kvlens.lens.method_reasons import Told
from kvlens.text.units import counted


def evicted(facts: Facts) -> str:
    """Return where the span lies, outside of what the method keeps."""
    sinks = int(facts.reader.meta.config.get("sinks") or 0)
    return f"it lies outside the {counted(sinks, 'sink')} and the newest tokens that the budget holds"


def told(facts: Facts) -> Told | None:
    """The window lies side by side, so that only the sinks lie elsewhere inside the cache than in the text."""
    if facts.reader.meta.config.get("positions") != "cache" or not facts.read or not facts.short:
        return None
    if set(facts.readings.values()) != {"all"}:
        return None
    near = "the first tokens are seen as if they lay directly before the window"
    return "elsewhere", f"it was attended whole, but {near}{'' if facts.kind == 'sink' else ', and took from it'}"
