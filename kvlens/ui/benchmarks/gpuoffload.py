"""The Benchmarks page's part about offload on a GPU: runs of a pretrained model, by method."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from kvlens.gpu.bench.offloadrow import OffloadRow
from kvlens.ui.common.widgets import plain


def show_offload(found: Sequence[OffloadRow]) -> None:
    """A table, and what it says of what; nothing where nothing was run."""
    if not found:
        return
    first = found[0]
    st.dataframe(pd.DataFrame([_line(row) for row in found]), hide_index=True)
    st.caption(
        plain(
            f"Real offload: {first.model} in {first.dtype}, a prompt of {first.context:,} tokens, {first.budget} of "
            f"full KV on the device, {first.steps} steps through the engine, not recorded and recorded. Bytes and "
            "times are of all steps of the recorded run, from measured copies; its run's Memory page shows them one by "
            "one."
        )
    )


def _line(row: OffloadRow) -> dict[str, object]:
    def times(value: float | None, factor: float) -> float | None:
        return None if value is None else value * factor

    return {
        "method": row.method,
        "tokens/s": row.tokens_per_s,
        "tokens/s, recorded": row.recorded_tokens_per_s,
        "to the device (MB)": times(row.h2d_bytes, 1e-6),
        "to host memory (MB)": times(row.d2h_bytes, 1e-6),
        "waited (ms)": times(row.waited, 1e3),
        "copies under way (ms)": times(row.moving, 1e3),
        "beside the model, at least": row.overlapped,
        "run": row.trace or "",
        "notes": "; ".join(part for part in (*row.failed, row.note, row.reason or "") if part),
    }
