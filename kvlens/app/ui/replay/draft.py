"""What is being put together to be tried on a run: the lists of what to hold and what to drop, from which step, at
which budget. It lives in the session and in the address (?hold=40.L2_t396-401&drop=12&from=3&budget=30), so that a link
and Back bring it again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import streamlit as st

from kvlens.lens.pieces import Piece

MOST = 32
"""pieces on the lists"""
FIELDS = ("hold", "drop", "from", "budget")
_KEY, _WRITTEN = "kvlens_draft", "kvlens_draft_written"
_SHARE = re.compile(r"\d{1,3}(\.\d)?", re.ASCII)


@dataclass(frozen=True)
class Draft:
    """Nothing in it: what the run missed most is held, or what is selected dropped, at the run's own budget."""

    run: str
    pieces: tuple[Piece, ...] = ()
    from_step: int | None = None
    """None: the step of loss"""
    share: float | None = None
    """percent of the budget, or of what stands for it; None: the run's own"""
    drops: tuple[Piece, ...] = ()

    @property
    def listed(self) -> int:
        """Pieces on both lists."""
        return len(self.pieces) + len(self.drops)

    def query(self) -> dict[str, str]:
        """URL parameters, chosen fields only."""
        return {
            **({"hold": "_".join(map(str, self.pieces))} if self.pieces else {}),
            **({"drop": "_".join(map(str, self.drops))} if self.drops else {}),
            **({} if self.from_step is None else {"from": str(self.from_step)}),
            **({} if self.share is None else {"budget": f"{self.share:g}"}),
        }

    def toggled(self, pieces: tuple[Piece, ...], verb: str = "hold") -> Draft:
        """All of `pieces` taken off the list to hold, or to drop, where they are on it, else added there and taken off
        the other one."""
        same_list, other_list = (self.pieces, self.drops) if verb == "hold" else (self.drops, self.pieces)
        if set(pieces) <= set(same_list):
            same_list = tuple(piece for piece in same_list if piece not in pieces)
        else:
            same_list = tuple(dict.fromkeys((*same_list, *pieces)))
            other_list = tuple(piece for piece in other_list if piece not in pieces)
        holds, drops = (same_list, other_list) if verb == "hold" else (other_list, same_list)
        return replace(self, pieces=holds, drops=drops)


def parse(run: str, params: Mapping[str, str]) -> Draft:
    """From URL parameters; what cannot be read is left out, and what the list has no room for."""
    pieces = _listed(params.get("hold", ""), MOST)
    drops = tuple(piece for piece in _listed(params.get("drop", ""), MOST - len(pieces)) if piece not in pieces)
    start, share = params.get("from", ""), params.get("budget", "")
    whole = start.isascii() and start.isdigit() and len(start) <= 9
    return Draft(
        run,
        pieces,
        int(start) if whole else None,
        float(share) if _SHARE.fullmatch(share) and 0 < float(share) <= 100 else None,
        drops,
    )


def _listed(text: str, most: int) -> tuple[Piece, ...]:
    pieces: dict[Piece, None] = {}
    for written in text.split("_")[:most]:
        try:
            pieces[Piece.parse(written)] = None
        except ValueError:
            continue
    return tuple(pieces)


def enter(place: Mapping[str, str], run: str) -> None:
    """First thing on the page of a run. place: the address that it was asked for with (`in_url`). A list that came in a
    link or by Back wins over the session's; what belongs to another run than the one that was chosen is left behind."""
    if place.get("run") == run and place != st.session_state.get(_WRITTEN):
        st.session_state[_KEY] = parse(run, place)
        st.session_state[_WRITTEN] = dict(place)
    elif place.get("run") not in (None, run):
        st.query_params.pop("whatif", None)


def current(run: str) -> Draft:
    """What is put together for a run."""
    stored_draft = st.session_state.get(_KEY)
    return stored_draft if isinstance(stored_draft, Draft) and stored_draft.run == run else Draft(run)


def change(draft: Draft) -> None:
    """Puts another one in its place. The address that came with the change is older than it."""
    st.session_state[_KEY] = draft
    st.session_state[_WRITTEN] = in_url()


def go_back_to(draft: Draft, whatif: str) -> None:
    """Puts another one in its place, and the try it was made for (?whatif=) beside it: one step of the history."""
    change(draft)
    other_parameters = {
        name: value for name, value in st.query_params.to_dict().items() if name not in (*FIELDS, "whatif")
    }
    st.query_params.from_dict({**other_parameters, "whatif": whatif, **draft.query()})


def query(run: str) -> dict[str, str]:
    """The draft's part of the address, to be written now."""
    target = current(run).query()
    st.session_state[_WRITTEN] = {"run": run, **target}
    return target


def in_url() -> dict[str, str]:
    """The draft's part of the address, and the run it is for."""
    return {name: st.query_params[name] for name in ("run", *FIELDS) if name in st.query_params}
