"""What a run of SeKV decides about its shared zones, step by step."""

from __future__ import annotations

from statistics import fmean
from typing import ClassVar

import numpy as np

from kvlens.memory.placement import Placement
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.sekv.method import SeKV
from kvlens.records import PrefillRecord, StepRecord
from kvlens.tiers.layout import Layout


class Watched(SeKV):
    """SeKV that shows how it laid out the device."""

    layouts: ClassVar[list[Layout]] = []

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        layout, placement = super().prefill_end(prompt)
        self.layouts[:] = [layout]
        return layout, placement


class Decisions:
    """A sink that counts what was asked for, granted and refused."""

    def __init__(self) -> None:
        self.zoom_rate: list[float] = []
        self.h2d: list[float] = []
        self.logprobs: list[float] = []
        self.granted: list[tuple[float, float]] = []
        """spans and tokens of each step"""
        self.refused: list[tuple[float, float]] = []

    def prefill(self, record: PrefillRecord) -> None:
        """Prefill expands nothing."""

    def step(self, record: StepRecord) -> None:
        kv, over = record.kv, [row.value or 0.0 for row in record.events if row.kind == "refused"]
        self.zoom_rate.append(float(record.head["zoom_rate"].mean()))
        self.h2d.append(float(kv["h2d_bytes"].sum()))
        self.logprobs.append(record.logprob if record.logprob is not None else float("nan"))
        spans, tokens = (
            float((kv[f"{came}"] + kv[f"{was}"]).sum())
            for came, was in (("n_recalled", "n_reused"), ("recalled_tokens", "reused_tokens"))
        )
        self.granted.append((spans, tokens))
        self.refused.append((float(len(over)), sum(over)))

    def figures(self, slots: int) -> dict[str, float]:
        """Return means over the steps, and shares of all that was asked for. slots: of the model's expanded spans."""
        granted, refused = np.array(self.granted).sum(0), np.array(self.refused).sum(0)
        shares = refused / np.maximum(granted + refused, 1)
        return {
            "zoom_rate": fmean(self.zoom_rate),
            "refused_spans": float(shares[0]),
            "refused_tokens": float(shares[1]),
            "room_used": float(granted[1] / len(self.granted) / slots),
            "h2d_bytes": fmean(self.h2d),
            "logprob": fmean(self.logprobs),
        }

    def requests(self) -> dict[str, float]:
        """Return the spans that were asked for, granted and refused in a step, means over the steps."""
        granted, refused = np.array(self.granted).mean(0), np.array(self.refused).mean(0)
        return {"asked": float(granted[0] + refused[0]), "granted": float(granted[0]), "refused": float(refused[0])}
