"""What a search for little that brings the answer back came to, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlens.text.units import counted, si_bytes

if TYPE_CHECKING:
    from kvlens.metaparts import Search


def describe_search(search: Search) -> str:
    """A sentence or two."""
    if search.needless:
        return "Nothing has to be held: what was asked for otherwise brings the answer back by itself."
    if search.finer is not None:
        return _bits(search, search.finer)
    if search.most is not None:
        return _bytes(search, search.most)
    tried = counted(search.tried or 0, "set") + " of heads tried"
    names = ", ".join(f"L{layer} KV{head}" for layer, head in search.heads)
    if not names:
        return f"Not even holding it for all of these heads brings the answer back ({tried})."
    return f"Smallest set found: {names} ({tried}{_nats(search, ' over the answer')})."


def _bytes(search: Search, most: int) -> str:
    tried = search.tried or 0
    allowed = "" if search.ended else f", as many as were allowed ({most})"
    if search.triples:
        names = ", ".join(f"span {span} for L{layer} KV{head}" for layer, head, span in search.triples)
        sets = counted(tried, "set")
        return f"Fewest bytes found: {names} ({sets} tried{allowed}; not proved fewest{_nats(search)})."
    none = f"None of the {tried} sets tried{allowed}, brings" if allowed else f"None of the {tried} sets tried brings"
    if tried == 1:
        none = f"The one set tried{allowed}, does not bring" if allowed else "The one set tried does not bring"
    # a search without a find has ended where the last set that it tried was all candidates
    largest = "which were the largest set tried" if search.ended else "which the search did not try"
    return f"{none} the answer back; all candidates are held, {largest}."


def _bits(search: Search, finer: str) -> str:
    tried = counted(search.tried or 0, "set") + " tried"
    tried += "" if search.ended else f", as many as were allowed ({search.most})"
    if not finer:
        return f"Not even exact numbers everywhere bring the answer back ({tried}): the bits do not cost it."
    sides = ", ".join(finer.split(","))
    return (
        f"Fewest extra bits found: {sides}, {si_bytes(search.extra_bytes or 0)} more or "
        f"{search.extra_bits or 0:.3g} bits per packed number ({tried}; not proved fewest{_nats(search)})."
    )


def _nats(search: Search, where: str = "") -> str:
    return "" if search.kl is None else f", KL {search.kl:.4g} nats{where}"
