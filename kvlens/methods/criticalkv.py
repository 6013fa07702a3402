"""CriticalKV: half of the tokens by attention, half by attention times what their values do to the output."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.methods.families.two_stages import TwoStages, TwoStagesParameters, refuses_two_stages
from kvlens.methods.hooks import Needs
from kvlens.methods.snapkv import OBSERVED, SnapKV, SnapKVParameters
from kvlens.methods.wrappers import Lending, Lent


@dataclass(frozen=True)
class CriticalKVParameters(TwoStagesParameters, SnapKVParameters):
    """Lengths are in tokens. Defaults are the paper's, on SnapKV's scores."""


class CriticalKV(TwoStages, SnapKV):
    """Scores as SnapKV; half of each KV head's tokens are the best of these scores. The others rank by score times the
    L1 norm of the value behind the output projection, which bounds what leaving the token out does to the layer's
    output (paper sec. 4, Algorithm 1). `critical:METHOD` does the same with another score.

    Departures: as SnapKV's. The epsilon is added to SnapKV's sum over the window's queries, where the paper's score is
    their mean. The norms of a KV head's query heads are averaged. The window is no part of the first stage.
    """

    name = "criticalkv"
    title = "CriticalKV"
    paper = "Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective, 2025"
    summary = (
        "drops prompt tokens once, when prefill ends: each KV head keeps what the last prompt tokens attend to, half "
        "of it weighed by what the values do to the output"
    )
    Parameters = CriticalKVParameters
    presets = {"paper": {}, "demo": {"window": 8}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED, peek=True, inputs=True)
    lends = Lending(
        front=Lent(
            "critical",
            TwoStages,
            TwoStagesParameters,
            "half of it weighed by what values do to the output",
            refuses_two_stages,
            {"inputs": True},
        )
    )
    params: CriticalKVParameters
