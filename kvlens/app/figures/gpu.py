"""GPU results as figures: ceilings, kernels as shares of them, steps over their floors. Rows as kvlens.lab.results.gpu
has them."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from kvlens.app.figures.methodmarks import mark
from kvlens.app.figures.theme import BLUE, GREY, ORANGE, SKY, finish
from kvlens.lab.gpu.settings import title
from kvlens.lab.results.gpu import CeilingRow, KernelRow, RecordingRow, StepRow


def zero_copy(rows: Sequence[CeilingRow]) -> go.Figure:
    """Rates of the bus in GB/s: a bar per row."""
    names = [f"{row.name}<br>{row.setting.rpartition(', ')[2]}" for row in rows]
    figure = go.Figure(
        go.Bar(
            x=names, y=[row.rate / 1e9 for row in rows], marker_color=BLUE, hovertemplate="%{y:.1f} GB/s<extra></extra>"
        )
    )
    finish(figure, 320, uirevision="gpu-bus")
    figure.update_yaxes(title_text="over the bus (GB/s)", rangemode="tozero")
    return figure


def kernel_shares(rows: Sequence[KernelRow]) -> go.Figure:
    """Share of the measured ceiling each kernel reaches; orange where it stays below its aim, grey where there is
    none."""
    shown = [row for row in rows if row.share is not None][::-1]
    colors = [GREY if row.aim is None else BLUE if (row.share or 0) >= row.aim else ORANGE for row in shown]
    hover = [
        f"{row.kernel}, {row.setting}<br>{1e6 * (row.seconds or 0):.1f} us, {(row.rate or 0) / 1e9:.0f} GB/s, "
        f"{row.share:.0%} of {row.ceiling}"
        for row in shown
    ]
    labels = [f"{row.kernel}: {row.setting}" for row in shown]
    figure = go.Figure(
        go.Bar(
            x=[row.share for row in shown],
            y=labels,
            orientation="h",
            marker_color=colors,
            hovertext=hover,
            hoverinfo="text",
        )
    )
    finish(figure, 90 + 18 * len(shown), uirevision="gpu-kernels")
    figure.add_vline(x=0.8, line_dash="dot", line_color=GREY)
    figure.update_xaxes(title_text="share of the ceiling measured on this device", tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(automargin=True)
    return figure


def step_times(rows: Sequence[StepRow], context: int, batch: int) -> go.Figure:
    """Median time of a step by method with its 95th percentile; the whole decode loop where it was timed, as a diamond;
    the floor as a grey line."""
    shown = [row for row in rows if (row.context, row.batch) == (context, batch) and row.median is not None]
    titles = [title(row.method) for row in shown]
    late = [1e3 * ((row.p95 or 0) - (row.median or 0)) for row in shown]
    figure = go.Figure()
    figure.add_bar(
        x=titles,
        y=[1e3 * (row.median or 0) for row in shown],
        name="median, up to the 95th percentile",
        marker_color=[mark(row.method).color for row in shown],
        error_y={"array": late, "thickness": 1, "width": 4},
        hovertemplate="%{x}: %{y:.2f} ms<extra></extra>",
    )
    loops = [(name, row.loop) for name, row in zip(titles, shown, strict=True) if row.loop is not None]
    if loops:
        figure.add_scatter(
            x=[name for name, _ in loops],
            y=[1e3 * loop for _, loop in loops],
            mode="markers",
            name="in the decode loop, host included",
            marker={"symbol": "diamond-open", "size": 10, "color": ORANGE},
            hovertemplate="in the loop %{y:.2f} ms<extra></extra>",
        )
    floors = [(name, row.floor) for name, row in zip(titles, shown, strict=True) if row.floor is not None]
    figure.add_scatter(
        x=[name for name, _ in floors],
        y=[1e3 * floor for _, floor in floors],
        mode="markers",
        name="floor by bytes",
        marker={"symbol": "line-ew-open", "size": 34, "line": {"width": 3}, "color": GREY},
        hovertemplate="floor %{y:.2f} ms<extra></extra>",
    )
    finish(figure, 400, uirevision=f"gpu-steps-{context}-{batch}", legend=True)
    figure.update_layout(legend={"orientation": "h", "y": -0.3})
    figure.update_yaxes(title_text="one step (ms)", rangemode="tozero")
    return figure


def recording(rows: Sequence[RecordingRow]) -> go.Figure:
    """Median time of a step with nothing, numbers per head and masses of spans recorded, launched as a graph and one by
    one."""
    figure = go.Figure()
    for graph, name, color in ((True, "in a CUDA graph", BLUE), (False, "launched one by one", SKY)):
        shown = [row for row in rows if row.graph == graph]
        figure.add_bar(
            x=[row.recording for row in shown],
            y=[1e3 * row.median for row in shown],
            name=name,
            marker_color=color,
            error_y={"array": [1e3 * (row.p95 - row.median) for row in shown], "thickness": 1, "width": 4},
            customdata=[row.added for row in shown],
            hovertemplate="%{x}: %{y:.2f} ms, %{customdata:+.1%} against off<extra>%{fullData.name}</extra>",
        )
    finish(figure, 320, uirevision="gpu-recording", legend=True)
    figure.update_layout(barmode="group", legend={"orientation": "h", "y": -0.25})
    figure.update_xaxes(title_text="recorded")
    figure.update_yaxes(title_text="one step (ms)", rangemode="tozero")
    return figure
