"""What few bits did to a span that nothing is missing of: how far its keys and values are off, and its score."""

from __future__ import annotations

import numpy as np

from kvlens.lens.facts import NOTHING, Facts


def in_bits(facts: Facts) -> str:
    """Relative errors of a packed span, and what they did to the score that the query head which missed most gave it:
    the log odds of its mass, against those under full attention."""
    rows = facts.reader.span_heads(facts.layer, facts.kv_head)
    rows = rows[rows["span"] == facts.span]
    parts = [
        f"{name} {float(rows[column].iloc[0]):.2f}"
        for name, column in (("keys", "err_k"), ("values", "err_v"))
        if len(rows) and rows[column].notna().iloc[0]
    ]
    note = f"relative error of {', '.join(parts)}" if parts else "with an error that was not recorded"
    if facts.q_head is None:
        return note
    worst = facts.listed.loc[facts.listed["q_head"] == facts.q_head].iloc[0]
    shift = _log_odds(float(worst["mass"])) - _log_odds(float(worst["own"]))
    return (
        f"{note}; its log odds in query head {facts.q_head}'s attention are {shift:+.2f} nats off those of exact keys"
    )


def _log_odds(mass: float) -> float:
    inside = min(max(mass, NOTHING), 1 - NOTHING)
    return float(np.log(inside / (1 - inside)))
