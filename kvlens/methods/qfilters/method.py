"""Q-Filters: one direction per KV head, calibrated for the model, along which queries lie; keys along it stay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.modelfigures import Calibration, Content, shipped
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, RunContext, torch_seed
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QFiltersParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    window: int = param(32, "last prompt tokens, kept without a comparison", ours=True)
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)
    filters: str = param(
        "calibrated",
        "directions of the calibration, or drawn ones (a control that needs no calibration)",
        choices=("calibrated", "drawn"),
        ours=True,
    )
    calibration: str = param(
        "", "file made by `kvlens calibrate qfilters`; empty: the one shipped for the model", ours=True
    )


def read_filters(content: Content, params: QFiltersParameters, shape: KVShape) -> list[list[list[float]]]:
    """Return the directions [L][H_kv][D]. Raises ValueError with one sentence where they are of another model's
    sizes."""
    filters = [[[float(x) for x in head] for head in layer] for layer in content.figures["filters"]]
    sizes = {len(head) for layer in filters for head in layer}
    if [len(layer) for layer in filters] != [shape.kv_heads] * shape.layers or sizes != {shape.head_dim}:
        raise ValueError(f"'{content.name}' does not have a filter for every KV head of every layer.")
    return filters


class QFilters(PromptEviction):
    """The queries of a head lie mostly along one direction, whatever the text. Each KV head keeps the tokens whose keys
    have the largest component along its filter, the main direction of its queries over calibration texts, turned so
    that queries are on its positive side (paper sec. 3). No query of the run is looked at.

    Departures: filters of the query heads of a KV head are averaged, as in the authors' code. `kvlens calibrate
    qfilters` takes the main direction of all queries of the texts; the authors draw 3,000 of them, and turn a filter to
    the side of most queries instead of their mean. Only the prompt is compressed, once.
    """

    name = "qfilters"
    title = "Q-Filters"
    paper = "Godey et al., Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression, 2025"
    summary = (
        "drops prompt tokens once, when prefill ends: each KV head keeps the keys along the main direction of its "
        "queries, calibrated for the model"
    )
    Parameters = QFiltersParameters
    presets = {"paper": {}}  # noqa: RUF012
    needs = Needs()
    calibrations = (
        Calibration(
            "query filters",
            "calibration",
            shipped(Path(__file__).parent),
            "kvlens calibrate qfilters --model {model} --out FILE",
            "set filters=drawn, which needs none",
            lambda params: params.filters == "calibrated",
            read_filters,
        ),
    )
    untrained = {"filters": "drawn"}  # noqa: RUF012
    params: QFiltersParameters

    def __init__(self, params: QFiltersParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self._filters: Any = context.calibration.get("query filters")

    def score(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        import torch

        shape = self.context.shape
        if self._filters is None:
            drawn = torch.Generator().manual_seed(torch_seed(self.context.seed * shape.layers + layer))
            directions = torch.randn(shape.kv_heads, shape.head_dim, generator=drawn)
        else:
            directions = torch.tensor(self._filters[layer])
        keys = prompt.keys[layer, :, :end].float()
        return (keys @ directions.to(keys.device)[..., None])[..., 0]
