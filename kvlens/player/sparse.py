"""Tables of few spans per step, as the player is sent them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kvlens.player.codec import quantise


def places(spans: pd.DataFrame) -> pd.Series:
    """Span -> its place in the list of spans."""
    return pd.Series(np.arange(len(spans)), spans["span"].to_numpy())


def sparse(
    name: str, table: pd.DataFrame, n_steps: int, index: pd.Series, shares: Sequence[str] = ("mass",)
) -> dict[str, np.ndarray]:
    """Rows (step, span, shares), in the order of steps, as row starts [steps + 1], places of spans and codes of
    0..1."""
    starts = np.searchsorted(table["step"].to_numpy(np.int64), np.arange(n_steps + 1)).astype(np.int32)
    codes = {f"{name}_{share}": quantise(table[share].to_numpy(np.float64), 0.0, 1.0) for share in shares}
    rows = index.loc[table["span"].to_numpy(np.int64)].to_numpy(np.int32)
    return {f"{name}_start": starts, f"{name}_span": rows, **codes}
