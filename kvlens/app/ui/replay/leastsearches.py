"""The searches for little that brings an answer back, as buttons of Replay."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common import sentences
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.request import TryChoice
from kvlens.methods.naming import installed


def packs_numbers(reader: TraceReader) -> bool:
    """Return True if the run's method stores numbers in few bits, also in runs from before the parameter `finer`."""
    method = installed(str(reader.meta.method))
    return method is not None and hasattr(method.Parameters, "finer")


def offer_searches(busy: bool, choice: TryChoice, offered: bool, packs: bool) -> str:
    """'heads', 'bytes' or 'bits' where such a search is asked for. packs: the run stores numbers in few bits."""
    off = busy or bool(choice.drops)
    why = "The search works on holds only. Remove the drops first." if choice.drops else None
    with st.popover("Find the least", icon=":material/search:", disabled=off, key=f"least_{off}", help=why):
        heads = st.button(
            sentences.SMALLEST_SET,
            disabled=not (offered or choice.pieces),
            width="stretch",
            help="Repeats the run with the hold for fewer and fewer KV heads, until no head can be left out.",
        )
        least = st.button(
            "Restore with the fewest bytes",
            width="stretch",
            help="Holds the first lines of the ranking, each one KV head and span. Then removes those without need.",
        )
        bits = packs and st.button(
            "Restore with the fewest bits",
            width="stretch",
            help="Stores keys or values of single KV heads in more bits, then removes those that are not needed.",
        )
    return "heads" if heads else "bytes" if least else "bits" if bits else ""
