"""Whether what is listed can be tried at all: a link may list what the run does not have."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.app.ui.common.data import TraceReader
from kvlens.holds import apart
from kvlens.lens.pieces import Piece
from kvlens.lens.trial_request import TrialRequest, drops_for, holds_for
from kvlens.rows import SpanRow


@dataclass(frozen=True)
class _Run:
    """As kvlens.lens.trial_request.Named has it."""

    uid: str
    layers: int
    kv_heads: int
    spans: tuple[SpanRow, ...]
    positions: int


def refusal(reader: TraceReader, holds: tuple[Piece, ...], drops: tuple[Piece, ...], step: int) -> str:
    """Why these cannot be held and dropped from a step on, the sentence of `kvlens whatif`; '' where they can."""
    if not holds and not drops:
        return ""
    prompt = int(reader.tokens()["step"].isna().sum())
    run = _Run(reader.uid, reader.n_layers, reader.kv_heads, reader.span_rows(), prompt - 1 + reader.n_steps)
    request = TrialRequest(pieces=holds, drops=drops, from_step=step)
    try:
        apart(holds_for(run, request, ()) if holds else (), drops_for(run, request))
    except ValueError as error:
        return str(error)
    return ""
