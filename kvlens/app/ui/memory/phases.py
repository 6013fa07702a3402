"""The section of the Memory page on time: latencies, and the phases of the steps."""

from __future__ import annotations

import streamlit as st

from kvlens.app.figures.phases import PHASES, by_step
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.widgets import plain
from kvlens.tables.latency import latency, phase_means
from kvlens.text.units import duration

LEVELS = (("until the first token", "first_token"), ("per token after it", "per_token"), ("in all", "end_to_end"))


def phases(reader: TraceReader) -> None:
    """Draw the stacked phases of every step and print the latencies of the run."""
    st.markdown("##### Where the time went")
    st.caption(plain(latency_text(reader)))
    frame = reader.phases()
    if frame.empty:
        st.info("Phases were not timed in this run. They are timed on a CPU, since kvlens 0.2.")
        return
    chart(by_step(frame), frame, f"{reader.uid}-phases", "memory_phases", "Phases of every decode step, stacked")
    means = phase_means(reader)
    total = sum(means.values())
    shares = ((name, duration(means[phase]), means[phase] / total) for phase, (name, _) in PHASES.items())
    parts = ", ".join(f"{name} {took} ({share:.0%})" for name, took, share in shares)
    st.caption(
        plain(
            f"Mean of {_which(reader)}: {parts}. Wait and copy depend on the link, here "
            f"{reader.meta.link or 'not recorded'}, and on what else the machine does; they are no property of the "
            "method alone."
        )
    )


def _which(reader: TraceReader) -> str:
    """Return the steps that the mean is of: 'all 3 steps, the first included'."""
    steps = reader.n_steps
    return f"all {steps} steps, the first included" if steps > 1 else "the only step"


def latency_text(reader: TraceReader) -> str:
    """Return the latencies in words, with the link and device that they were measured on."""
    times = latency(reader)
    parts = []
    for words, name in LEVELS:
        value = getattr(times, name)
        parts.append(f"{words} {duration(value) if value == value else 'not recorded'}")
    where = f"Device {reader.meta.device or 'not recorded'}, link {reader.meta.link or 'not recorded'}."
    return f"Time {', '.join(parts)}. {where} Recording and comparing are no part of it."
