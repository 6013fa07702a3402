"""What each method of a race will need, before it is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from kvlens import methods
from kvlens.app.ui.common import widgets
from kvlens.app.ui.common.likely import PLACING, Likely
from kvlens.app.ui.common.readahead import finished_phases
from kvlens.app.ui.common.request import MethodChoice, PromptChoice, Rivals
from kvlens.app.ui.run.preflight import LEAST_S, budget_phrase, condition_of, estimated, likely_of, limit_of
from kvlens.lens.knob import attends_by
from kvlens.methods.naming import display_name, preset_name
from kvlens.runs.races import Entrant, RaceRequest
from kvlens.runs.request import RunRequest, default_preset
from kvlens.text.units import counted, duration, si_bytes

WILL = {True: "yes", None: "may be refused", False: "will be refused"}


def panel(prompt: PromptChoice, choice: MethodChoice, rivals: Rivals, head: DeltaGenerator) -> bool:
    """Draws the estimate of every lane, and the race's condition into the page's head; True when the race can be
    started: a method that is refused is a lane that says why."""
    try:
        race = race_of(choice, rivals)
        race.check()
        lanes = [race.reference, *(lane for lane, _ in race.lanes())]
        estimates = [_estimate(prompt, lane) for lane in lanes]
        _check_lanes(race, estimates[1:])
    except (ValueError, OSError, KeyError) as problem:
        widgets.error(str(problem))
        return False
    like = [
        likely_of(lane.model, lane.method, estimate, lane.against)
        for lane, estimate in zip(lanes, estimates, strict=True)
    ]
    phases = finished_phases(prompt, choice) & {"load", "prefill", "surprisal"}
    like = [lane if lane is None else lane.after(phases) for lane in like]
    limits = [limit_of(lane.method, lane.budget, estimate) for lane, estimate in zip(lanes, estimates, strict=True)]
    with head:
        widgets.condition_line(condition_of(prompt, choice, estimates[0]["prompt_tokens"], limits))
    with st.container(border=True):
        st.caption("Estimate before the race (not measured)")
        rows = [_row(*each) for each in zip(lanes, estimates, like, strict=True)]
        for row, entrant, estimate in zip(rows[1:], race.entrants, estimates[1:], strict=True):
            row["method"] = f"{row['method']} {race.difference(entrant, estimate['config'])}".strip()
        st.dataframe(pd.DataFrame(rows), hide_index=True, width="stretch", placeholder="")
        if time_sentence := _took(like, estimates):
            st.caption(widgets.plain(time_sentence))
        for lane, estimate in zip(lanes, estimates, strict=True):
            for warning in estimate["warnings"]:
                st.warning(widgets.page_sentence(f"{_title(lane, estimate)}: {warning}"))
    return any(estimate["feasible"] is not False for estimate in estimates[1:])


def _check_lanes(race: RaceRequest, estimates: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if a lane would run with the parameters of an earlier lane of its method."""
    configs: list[tuple[str, dict[str, Any]]] = []
    for entrant, estimate in zip(race.entrants, estimates, strict=True):
        config = estimate["config"]
        if config is not None and (entrant.method, config) in configs:
            words = race.difference(entrant, config)
            raise ValueError(f"Two lanes are {display_name(entrant.method, config)} {words}: change or remove one.")
        configs += [] if config is None else [(entrant.method, config)]


def race_of(choice: MethodChoice, rivals: Rivals) -> RaceRequest:
    """The race that the form asks for: the chosen method with its configuration, once more for each other value of a
    parameter, the others as they come."""
    own_values = [choice.changed, *(choice.changed | {name: value} for name, value in rivals.variants)]
    own_lanes = [Entrant(method=choice.method, preset=choice.preset, overrides=values) for values in own_values]
    shared = RunRequest(model=choice.model, budget=choice.budget, max_new=choice.max_new, **choice.form)
    entrants = (*own_lanes, *(Entrant(method=name) for name in rivals.methods))
    return RaceRequest(
        shared=shared, entrants=tuple(entrant for entrant in entrants if entrant.method != methods.REFERENCE)
    )


def _estimate(prompt: PromptChoice, lane: RunRequest) -> dict[str, Any]:
    names = ("chat", "system", "question", "chat_args", "turns", "carried")
    form = {name: getattr(lane, name) for name in names}
    return estimated(
        prompt.prompt, lane.model, lane.method, lane.preset, lane.overrides, lane.budget, lane.max_new, form
    )


def _row(lane: RunRequest, estimate: dict[str, Any], like: Likely | None) -> dict[str, str]:
    def size(count: int | None) -> str:
        return "" if count is None else si_bytes(count)

    has_tokens = estimate["prompt_tokens"] is not None
    return {
        "method": _title(lane, estimate),
        "preset": estimate["preset"] or "",
        "held to": (attends_by(lane.method, estimate["config"]) if has_tokens else None) or budget_phrase(estimate),
        "least it needs": size(estimate["min_budget_bytes"]),
        "will run": WILL[estimate["feasible"]] if has_tokens else "unknown",
        "trace on disk": size(estimate["trace_bytes"] if like is None else like.trace_bytes),
        "its steps": "" if like is None else f"about {duration(like.decode_s * 1e6)}",
    }


def _took(like: Sequence[Likely | None], estimates: Sequence[dict[str, Any]]) -> str:
    """How long the race will take, in words; '' where no run of the model is stored."""
    likely_lanes = [lane for lane in like if lane is not None]
    if len(likely_lanes) < len(like) or not likely_lanes:
        return ""
    load_s = max(lane.phases.get("load", 0.0) for lane in likely_lanes)
    prefill_s = next((lane.prefill_s for lane in likely_lanes if lane.prefill_s is not None), 0.0)
    placing_s = sum(lane.phases.get("place", 0.0) for lane in likely_lanes)
    steps_s = sum(lane.decode_s for lane in likely_lanes)
    lanes = f"{counted(len(likely_lanes), 'lane')} of at most {counted(estimates[0]['steps'], 'step')}"
    parts = {"loading the model": load_s, "reading the prompt, once": prefill_s, PLACING: placing_s, lanes: steps_s}
    named = ", ".join(f"{duration(seconds * 1e6)} {words}" for words, seconds in parts.items() if seconds >= LEAST_S)
    effects_s = sum(lane.phases.get("effect", 0.0) for lane in likely_lanes)
    lost = (
        f" If answers are lost, finding the causes takes up to {duration(effects_s * 1e6)} more." if effects_s else ""
    )
    total = duration(sum(parts.values()) * 1e6)
    finished = " The prompt has been read already." if likely_lanes[0].finished else ""
    return f"Time: about {total}: {named}, by stored runs of this model here.{lost}{finished}"


def _title(lane: RunRequest, estimate: dict[str, Any]) -> str:
    """Return what the lane's method is called with the parameters that it would run with."""
    config = estimate.get("config")
    if config is not None:
        return display_name(lane.method, config)
    usual = default_preset(lane.method, lane.model)
    return preset_name(lane.method, lane.preset or usual, lane.overrides, usual)
