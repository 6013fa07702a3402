"""What moved between the tiers per decode step, and what that cost. Tables as `TraceReader.transfer_times` gives
them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.theme import BLUE, GREEN, ORANGE, PURPLE, SKY, finish, whole_ticks
from kvlens.text.units import si_bytes

#: One colour per cause on every page (a zoom is a recall); a cause this version does not know is black.
CAUSE_COLORS = {"recall": BLUE, "zoom": BLUE, "prefetch": ORANGE, "correction": GREEN, "leave": PURPLE, "offload": SKY}
DIRECTIONS = {"h2d": "to device", "d2h": "to host memory"}


def bytes_by_cause(table: pd.DataFrame, n_steps: int) -> go.Figure:
    """Stacked bars of bytes per decode step, one colour per cause: solid what the engine waited for, hatched what ran
    in the background. Columns used: step, direction, cause, bytes, blocking_bytes; rows before step 0 are left out."""
    figure = go.Figure()
    decode = table[table["step"] >= 0]
    for (cause, direction), part in decode.groupby(["cause", "direction"], sort=True):
        blocking, total = part["blocking_bytes"].to_numpy(np.float64), part["bytes"].to_numpy(np.float64)
        for how, values, pattern in (("blocking", blocking, ""), ("background", total - blocking, "/")):
            if not values.any():
                continue
            label = f"{cause} {DIRECTIONS.get(str(direction), direction)}, {how}"
            hover = [
                f"step {step}: {si_bytes(value)}, {label}" for step, value in zip(part["step"], values, strict=True)
            ]
            figure.add_bar(
                x=part["step"],
                y=values,
                name=label,
                hovertext=hover,
                hoverinfo="text",
                marker={
                    "color": CAUSE_COLORS.get(str(cause), "#000"),
                    "pattern": {"shape": pattern, "size": 5},
                    "line": {"width": 0},
                },
            )
    _bars(figure, n_steps, "transfer-bytes")
    figure.update_layout(title_text="Bytes moved per decode step, all layers and KV heads", barmode="stack")
    figure.update_yaxes(title_text="bytes", tickformat="~s", ticksuffix="B", rangemode="tozero")
    return figure


def waiting(table: pd.DataFrame, n_steps: int) -> go.Figure:
    """Per decode step, how long copies took added up (wide bars) and how long the engine stood still for them (narrow
    bars), in ms.

    Columns used: step, moving_us, wait_us; rows before step 0 are left out. A step without copies is 0: the ledger
    knows them all."""
    sums = table[table["step"] >= 0].groupby("step")[["moving_us", "wait_us"]].sum()
    sums = sums.reindex(np.arange(n_steps), fill_value=0) / 1000
    figure = go.Figure()
    for column, label, color, width in (("moving_us", "moving", SKY, 0.85), ("wait_us", "waiting", ORANGE, 0.35)):
        hover = [f"step {step}: {value:.3g} ms {label}" for step, value in zip(sums.index, sums[column], strict=True)]
        figure.add_bar(
            x=sums.index,
            y=sums[column],
            name=f"{label} (ms)",
            width=width,
            marker={"color": color, "line": {"width": 0}},
            hovertext=hover,
            hoverinfo="text",
        )
    _bars(figure, n_steps, "transfer-times")
    figure.update_layout(title_text="Time of copies, and time the engine waited for them", barmode="overlay")
    figure.update_yaxes(title_text="ms per step", rangemode="tozero")
    return figure


def _bars(figure: go.Figure, n_steps: int, name: str) -> None:
    finish(figure, 340, uirevision=name, legend=True)
    figure.update_layout(
        bargap=0.15, legend={"orientation": "h", "y": -0.28, "yanchor": "top"}, dragmode=False, hovermode="closest"
    )
    figure.update_xaxes(title_text="decode step", range=[-0.5, max(0.5, n_steps - 0.5)], **whole_ticks(n_steps))
