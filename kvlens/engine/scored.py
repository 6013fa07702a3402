"""The queries that methods are handed."""

from __future__ import annotations

import torch


def scored(q: torch.Tensor, scaling: float) -> torch.Tensor:
    """Queries [..., D] by which the model's logits q . k * scaling are q . k / sqrt(D), as every method scores them:
    themselves, but for a family with a factor of its own (Granite) or none (OPT)."""
    usual = q.shape[-1] ** -0.5
    return q if scaling == usual else q * (scaling / usual)
