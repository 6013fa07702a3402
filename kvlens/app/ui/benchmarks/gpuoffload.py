"""The Benchmarks page's part about offload on a GPU: runs of a pretrained model, by method."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from kvlens.app.ui.common import sentences
from kvlens.app.ui.common.widgets import plain
from kvlens.lab.gpu.tables import offload_name
from kvlens.lab.results.offloadrow import OffloadRow


def show_offload(offload_rows: Sequence[OffloadRow]) -> None:
    """A table, and what it says of what; nothing where nothing was run."""
    if not offload_rows:
        return
    ran = list(dict.fromkeys(_ran(row) for row in offload_rows))
    alike = len(ran) == 1
    lines = [_line(row) if alike else {"run of": _ran(row), **_line(row)} for row in offload_rows]
    st.dataframe(pd.DataFrame(lines), hide_index=True)
    kind = ran[0] if alike else "runs of a pretrained model, as each row says"
    st.caption(
        plain(
            f"Real offload: {kind}, through the engine, not recorded and recorded. Bytes and times are of all steps of "
            "the recorded run, from measured copies; its run's Memory page shows them one by one."
        )
    )


def _ran(row: OffloadRow) -> str:
    """The model, its prompt and what it had, in words."""
    return (
        f"{row.model} in {row.dtype}, a prompt of {row.context:,} tokens, {row.budget} of full KV on the device, "
        f"{row.steps} steps"
    )


def _line(row: OffloadRow) -> dict[str, object]:
    def times(value: float | None, factor: float) -> float | None:
        return None if value is None else value * factor

    return {
        "method": offload_name(row),
        "tokens/s": row.tokens_per_s,
        "tokens/s, recorded": row.recorded_tokens_per_s,
        "to the device (MB)": times(row.h2d_bytes, 1e-6),
        "to host memory (MB)": times(row.d2h_bytes, 1e-6),
        "waited (ms)": times(row.waited, 1e3),
        "copies under way (ms)": times(row.moving, 1e3),
        sentences.BESIDE_MODEL: row.overlapped,
        "run": row.trace or "",
        "notes": "; ".join(part for part in (*row.wrong, row.note, row.reason or "") if part),
    }
