"""From the form to a queued job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from kvlens import methods, tasks
from kvlens.app.ui.common import data, sentences
from kvlens.app.ui.common.jobview import manager
from kvlens.app.ui.common.likely import likely
from kvlens.app.ui.common.readahead import finished_phases, reads
from kvlens.app.ui.common.request import MethodChoice, PromptChoice, command, race_command
from kvlens.app.ui.common.sample import sample
from kvlens.app.ui.common.tokens import counting
from kvlens.budget import WHOLE
from kvlens.lens.knob import asked_limit
from kvlens.methods.naming import installed_entry, preset_name
from kvlens.models.find import DEMO, default_model
from kvlens.refusal import Refusal
from kvlens.runs.preflight import estimate
from kvlens.runs.request import AUTO, DEFAULT_SHARE, default_preset
from kvlens.tasks.sample import TITLE


def submit(prompt: PromptChoice, choice: MethodChoice, then: str | None = None) -> str:
    """Queues the run; returns the job's id. `then`: the page that opens by itself when it is done."""
    file = manager().scratch("prompt.json", prompt.file_text())
    method = choice_name(choice) + (f" ({choice.preset})" if choice.preset else "")
    title = f"{method} on {choice.model}, {_limit_of(choice)}: {prompt.source}"
    argv = command(file, choice, data.runs_dir().resolve())
    phases = _likely_phases(prompt, choice)
    return manager().submit(argv, title, then=then, likely=phases, reads=reads(prompt, choice))


def _likely_phases(prompt: PromptChoice, choice: MethodChoice) -> dict[str, float]:
    """Seconds that each phase of the run will likely take; {} where no stored run of the model tells."""
    try:
        figures = estimate(
            prompt.prompt,
            choice.model,
            choice.method,
            choice.changed,
            choice.budget,
            choice.max_new,
            choice.preset,
            **choice.form,
        )
    except (ValueError, OSError, KeyError):
        return {}  # the run itself says what is wrong
    if figures["prompt_tokens"] is None:
        return {}
    sizes = (figures["prompt_tokens"], figures["steps"], figures["step_bytes"])
    like = likely(data.runs_dir(), choice.model, choice.method, *sizes, choice.against)
    return {} if like is None else like.after(finished_phases(prompt, choice)).phases


def choice_name(choice: MethodChoice) -> str:
    """Return what the chosen method is called with the chosen parameters."""
    usual = default_preset(choice.method, choice.model)
    return preset_name(choice.method, choice.preset or usual, choice.changed, usual)


def _limit_of(choice: MethodChoice) -> str:
    """What the chosen run is held to."""
    is_held_by_parameters = choice.budget == AUTO and data.keeps_all(choice.method)
    return asked_limit(choice.method, choice.changed, None if is_held_by_parameters else choice.budget)


def submit_race(
    prompt: PromptChoice, choice: MethodChoice, against: Sequence[str], variants: Sequence[tuple[str, str]] = ()
) -> str:
    """Queues a race of the chosen method against others at its budget; returns the job's id. variants: (parameter,
    value) of each further lane of the chosen method."""
    file = manager().scratch("prompt.json", prompt.file_text())
    argv = race_command(file, choice, against, data.runs_dir().resolve(), variants)
    names = ", ".join(
        choice_name(choice) if name == choice.method else preset_name(name, default_preset(name, choice.model))
        for name in dict.fromkeys(argv[argv.index("--methods") + 1].split(","))
    )
    if variants:
        names += f" ({variants[0][0]} as chosen, {', '.join(value for _, value in variants)})"
    title = f"Race of {names} on {choice.model}, {_limit_of(choice)}: {prompt.source}"
    return manager().submit(argv, title, reads=reads(prompt, choice))


def submit_trial(trial: Mapping[str, Any]) -> str:
    """Queues the run of a benchmark's trial, compared with full KV, whose Replay opens when it is done; returns the
    job's id.

    Keys: task, length, depth, seed, index, method, budget ('': no limit), preset, overrides (parameters over the
    preset's), and where they are not the usual ones model ('demo'), max_new (the task's own) and question ('in').
    Raises ValueError with one sentence."""
    model = str(trial.get("model") or DEMO)
    request = tasks.remake(trial, counting(model)[0])
    entry = installed_entry(str(trial["method"]))
    if entry is None:
        raise Refusal(
            f"the method '{trial['method']}' is not installed here.", code="unknown_method", method=trial["method"]
        )
    drawn = tasks.get(request.task).generation(request.index)
    if drawn.temperature:
        how = f"temperature {drawn.temperature:g}, top-p {drawn.top_p:g}, seed {drawn.seed}"
        raise ValueError(f"this trial used sampling ({how}), and the app runs greedy decoding only.")
    place = "" if request.depth is None else f", depth {request.depth:.0%}"
    source = f"{request.task}, {request.length or 'whole'} tokens{place}, seed {request.seed}"
    prompt = PromptChoice(tasks.prompt_of(request), source)
    # A method that keeps every token on the device is held to its budget by a parameter, which is among the overrides.
    budget = AUTO if entry["keeps_all"] else str(trial["budget"] or WHOLE)
    most = int(trial.get("max_new") or drawn.new_tokens)
    choice = MethodChoice(
        str(trial["method"]),
        model,
        trial.get("preset"),
        budget,
        most,
        0,
        dict(trial.get("overrides") or {}),
        trial["method"] != methods.REFERENCE,
        question=str(trial.get("question") or "in"),
    )
    return submit(prompt, choice, "pages/replay.py")


def sample_choice(method: str = methods.DEFAULT) -> tuple[PromptChoice, MethodChoice]:
    """What a sample button runs: the default model under a method, with the preset that fits the prompt, or, for the
    usual method on the real model, the one that answers it."""
    model = default_model()
    entry = next(entry for entry in data.catalogue() if entry["name"] == method)
    budget = AUTO if entry["keeps_all"] else "40%" if model == DEMO else f"{float(DEFAULT_SHARE):.0%}"
    preset = methods.ANSWERING if model != DEMO and method == methods.DEFAULT else None
    return sample(model), MethodChoice(method, model, preset, budget, 48, 0, against=not entry["keeps_all"])


def sample_buttons() -> None:
    """One click to a first run, whose Replay opens when it is done: on the real model one that loses its answer, or the
    usual method's."""
    usual, lost = (choice_name(choice) for _, choice in map(sample_choice, (methods.DEFAULT, methods.LOSING)))
    if default_model() == DEMO:
        labels = {methods.DEFAULT: sentences.RUN_SAMPLE}
    else:
        labels = {
            methods.LOSING: sentences.WATCH_LOSS,
            methods.DEFAULT: f"The same prompt under {usual} ({methods.ANSWERING}), which answers",
        }
    with st.container(horizontal=True):
        for number, (method, label) in enumerate(labels.items()):
            if st.button(
                label, type="secondary" if number else "primary", icon=":material/play_arrow:", key=f"sample_{method}"
            ):
                job = submit(*sample_choice(method), then="pages/replay.py")
                st.switch_page("pages/run.py", query_params={"job": job})
    if default_model() == DEMO:
        st.caption("A toy model that comes with kvlens answers a question about a generated text; under a minute.")
        return
    st.caption(
        f"{default_model()}, a real language model, answers a question about a real text ({TITLE}) with {lost} keeping "
        f"{float(DEFAULT_SHARE):.0%} of its KV cache. The Replay opens where the answer is lost and says what was "
        f"missed there and why; one click holds it, and the answer comes back. {usual} runs with its preset "
        f"{methods.ANSWERING}, a departure from its paper; what it answers as published is on the Benchmarks page."
    )
