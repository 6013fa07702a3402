"""Names of figures and thresholds that stored studies and study files had before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EARLIER = {"kl_nats": "kl_mean_nats", "kl_there": "kl_at_loss_nats"}
"""earlier name -> name"""


def rename_earlier(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures or thresholds by name, earlier names replaced."""
    return {EARLIER.get(name, name): value for name, value in values.items()}


def rename_figures(row: dict[str, Any]) -> dict[str, Any]:
    """Return the stored row of a trial with the names that figures have now."""
    figures = row.get("figures") if isinstance(row, dict) else None
    return {**row, "figures": rename_earlier(figures)} if isinstance(figures, dict) else row
