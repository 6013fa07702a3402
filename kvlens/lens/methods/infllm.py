"""Why a span that InfLLM attended whole got less than full attention gives it: keys were seen from elsewhere (sec.
3.1)."""

from __future__ import annotations

from kvlens.lens.facts import Facts
from kvlens.lens.method_reasons import Told


def told(facts: Facts) -> Told | None:
    """A block is attended whole by all query heads of a layer, or not at all."""
    config = facts.reader.meta.config
    if config.get("positions") != "far" or not facts.read or not facts.short:
        return None
    window = config.get("window")
    return "elsewhere", f"it was attended whole, but tokens farther than {window} are seen as if they lay just so far"
