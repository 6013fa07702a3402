"""From the form to a queued job."""

from __future__ import annotations

import streamlit as st

from kvlens.ui import data
from kvlens.ui.jobview import manager
from kvlens.ui.promptform import sample
from kvlens.ui.request import MethodChoice, PromptChoice, command
from kvlens.ui.tokens import encoder


def submit(prompt: PromptChoice, choice: MethodChoice) -> str:
    """Queues the run; returns the job's id."""
    file = manager().scratch("prompt.json", prompt.file_text())
    title = f"{choice.method}{f' ({choice.preset})' if choice.preset else ''} on {choice.model}, budget {choice.budget}: {prompt.source}"
    return manager().submit(command(file, choice, data.runs_dir().resolve()), title)


def sample_choice() -> tuple[PromptChoice, MethodChoice]:
    """What the 'Run the sample prompt' button runs: the demo model under SeKV, or the first method there is."""
    entries = {entry["name"]: entry for entry in data.catalogue()}
    entry = entries.get("sekv") or next(iter(entries.values()))
    preset = next((name for name in ("demo", *entry["presets"]) if name in entry["presets"]), None)
    budget = "100%" if entry["keeps_all"] else "40%"
    return sample(encoder("demo")[0]), MethodChoice(entry["name"], "demo", preset, budget, 48, 0)


def sample_button(label: str = "Run the sample prompt") -> None:
    """One click to a first run; goes to the page that shows its progress."""
    if st.button(label, type="primary", icon=":material/play_arrow:"):
        st.switch_page("pages/run.py", query_params={"job": submit(*sample_choice())})
