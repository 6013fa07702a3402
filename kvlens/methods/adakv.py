"""AdaKV: the KV heads of a layer share its budget by where their best tokens lie."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.methods.families.head_shares import HeadShares, HeadSharesParameters, refuses_head_shares
from kvlens.methods.snapkv import SnapKV, SnapKVParameters
from kvlens.methods.wrappers import Lending, Lent


@dataclass(frozen=True)
class AdaKVParameters(HeadSharesParameters, SnapKVParameters):
    """Lengths are in tokens. Defaults are the paper's, on SnapKV's scores."""


class AdaKV(HeadShares, SnapKV):
    """Scores as SnapKV; of a layer's scores, all KV heads together, the best as many as the budget holds are counted by
    head, and each head keeps as many of its own best tokens as it has among them (paper Algorithm 1), mixed with an
    equal share: count * (1 - floor) + C * floor (paper sec. 4.3). Heads of spread attention gain tokens, those with one
    strong peak give them.

    `adakv:METHOD` divides by another score. Departures: as SnapKV's. Rounding keeps the layer's sum exact.
    """

    name = "adakv"
    title = "AdaKV"
    paper = "Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, NeurIPS 2025"
    summary = (
        "drops prompt tokens once, when prefill ends: what the last prompt tokens attend to stays, and KV heads whose "
        "attention is spread keep more of it"
    )
    Parameters = AdaKVParameters
    presets = {"paper": {}, "demo": {"window": 8}}  # noqa: RUF012
    lends = Lending(
        front=Lent(
            "adakv",
            HeadShares,
            HeadSharesParameters,
            "KV heads with more of a layer's best scores keep more",
            refuses_head_shares,
        )
    )
    params: AdaKVParameters
