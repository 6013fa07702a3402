"""Surprisal of prompt tokens without sequence x vocabulary logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvlens.engine.models import LoadedModel

ROWS = 256
"""positions whose logits exist at a time"""


def chunk_surprisal(loaded: LoadedModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log p(targets[i] | everything up to hidden[i]) in nats: hidden [m, d] after the final norm, targets [m] ->
    float32 [m]."""
    head = loaded.model.get_output_embeddings()
    parts = [
        F.cross_entropy(head(hidden[i : i + ROWS]).float(), targets[i : i + ROWS], reduction="none")
        for i in range(0, len(targets), ROWS)
    ]
    return torch.cat(parts) if parts else torch.empty(0, device=hidden.device)
