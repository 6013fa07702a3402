"""What each method of a race will need, before it is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from kvlens import methods
from kvlens.app.ui.common import data, widgets
from kvlens.app.ui.common.request import MethodChoice, PromptChoice
from kvlens.app.ui.run.likely import Likely
from kvlens.app.ui.run.preflight import budget_said, estimated, likely_of
from kvlens.lens.knob import attends_by
from kvlens.runs.races import Entrant, RaceRequest
from kvlens.runs.request import RunRequest
from kvlens.text.units import counted, duration, si_bytes

WILL = {True: "yes", None: "may be refused", False: "will be refused"}


def panel(prompt: PromptChoice, choice: MethodChoice, rivals: Sequence[str]) -> bool:
    """Draws the estimate of every lane; True when the race can be started: a method that is refused is a lane that says
    why."""
    try:
        asked = race_of(choice, rivals)
        lanes = [asked.reference, *(lane for lane, _ in asked.lanes())]
        found = [_estimate(prompt, lane) for lane in lanes]
    except (ValueError, OSError, KeyError) as problem:
        widgets.error(str(problem))
        return False
    like = [likely_of(lane.model, lane.method, one) for lane, one in zip(lanes, found, strict=True)]
    with st.container(border=True):
        st.caption("Estimate before the race (not measured)")
        rows = [_row(*each) for each in zip(lanes, found, like, strict=True)]
        st.dataframe(pd.DataFrame(rows), hide_index=True, width="stretch", placeholder="")
        if said := _took(like, found):
            st.caption(widgets.plain(said))
        for lane, one in zip(lanes, found, strict=True):
            for warning in one["warnings"]:
                st.warning(widgets.plain(f"{_title(lane.method)}: {warning}"))
    return any(one["feasible"] is not False for one in found[1:])


def race_of(choice: MethodChoice, rivals: Sequence[str]) -> RaceRequest:
    """The race that the form asks for: the chosen method with its configuration, the others as they come."""
    chosen = Entrant(method=choice.method, preset=choice.preset, overrides=choice.changed)
    shared = RunRequest(
        model=choice.model,
        budget=choice.budget,
        max_new=choice.max_new,
        chat=choice.chat,
        system=choice.system,
        question=choice.question,
    )
    entrants = (chosen, *(Entrant(method=name) for name in rivals))
    return RaceRequest(shared=shared, entrants=tuple(one for one in entrants if one.method != methods.REFERENCE))


def _estimate(prompt: PromptChoice, lane: RunRequest) -> dict[str, Any]:
    form = (lane.chat, lane.system, lane.question)
    return estimated(
        prompt.prompt, lane.model, lane.method, lane.preset, lane.overrides, lane.budget, lane.max_new, *form
    )


def _row(lane: RunRequest, found: dict[str, Any], like: Likely | None) -> dict[str, str]:
    def size(count: int | None) -> str:
        return "" if count is None else si_bytes(count)

    known = found["prompt_tokens"] is not None
    return {
        "method": _title(lane.method),
        "preset": found["preset"] or "",
        "held to": (attends_by(lane.method, found["config"]) if known else None) or budget_said(found),
        "least it needs": size(found["min_budget_bytes"]),
        "will run": WILL[found["feasible"]] if known else "unknown",
        "trace on disk": size(found["trace_bytes"] if like is None else like.trace_bytes),
        "its steps": "" if like is None else f"about {duration(like.decode_s * 1e6)}",
    }


def _took(like: Sequence[Likely | None], found: Sequence[dict[str, Any]]) -> str:
    """How long the race will take, in words; '' where no run of the model is stored."""
    known = [one for one in like if one is not None]
    if len(known) < len(like) or not known:
        return ""
    steps = sum(one.decode_s for one in known)
    read = next((one.prefill_s for one in known if one.prefill_s is not None), None)
    before = "" if read is None else f"{duration(read * 1e6)} for the prompt, once, and "
    return (
        f"Time: about {before}{duration(steps * 1e6)} for {counted(len(known), 'lane')} of at most "
        f"{counted(found[0]['steps'], 'step')}, by stored runs of this model here; loading the model comes on top."
    )


def _title(method: str) -> str:
    return data.titles().get(method, method)
