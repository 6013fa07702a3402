"""The condition of a sweep's grids, in the words of `kvlens.lens.condition`."""

from __future__ import annotations

import pandas as pd

from kvlens.app.ui.benchmarks.griddata import Suite
from kvlens.lens.condition import AFTER, KNOWN, count_words, listed, token_words
from kvlens.models.find import short_model


def condition_of(suite: Suite, table: pd.DataFrame) -> str:
    """Return the condition of a sweep's grids in one line, as `kvlens.lens.condition` writes that of a run."""
    fed_after = suite.about.get("request", {}).get("question", "in") == "after"
    budgets = listed((f"budget {budget}" for budget in table["budget"] if budget), "budgets")
    count = count_words([int(n) for n in table["n"]])
    tokens = token_words([int(length) for length in table["length"]])
    parts = (short_model(suite.model), tokens, AFTER if fed_after else KNOWN, budgets, f"{count} a cell")
    return " · ".join(part for part in parts if part)
