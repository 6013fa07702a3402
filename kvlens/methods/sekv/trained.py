"""What SeKV's parameters ask to know of a model: a trained router, a map of its heads. No torch until it is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvlens.methods.families.retrieval_heads import head_map
from kvlens.methods.modelfigures import Calibration, Content, shipped
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.shape import KVShape

if TYPE_CHECKING:
    from kvlens.methods.sekv.router import Router

SHIPPED = shipped(Path(__file__).parent, ".safetensors")
"""model -> its router"""


def trained(found: Content, params: SeKVParameters, shape: KVShape) -> Router:
    """The router of a file. Raises ValueError with one sentence when it does not fit the model or the parameters."""
    from kvlens.methods.sekv.router import router_of

    router = router_of(found.figures, found.provenance, found.name, shape)
    if router.weight.shape[2] != params.dim:
        raise ValueError(
            f"{found.name} routes in {router.weight.shape[2]} dimensions, the parameter dim is {params.dim}."
        )
    if router.gates is not None and router.gates.max_rank < params.max_rank:
        raise ValueError(
            f"{found.name} has gates for {router.gates.max_rank} ranks, the parameter max_rank is {params.max_rank}."
        )
    return router


ROUTER = Calibration(
    "trained router",
    "router_file",
    SHIPPED,
    "kvlens train sekv --model {model} TEXTS",
    "use router=pca, which needs no training",
    lambda params: params.router == "trained",
    trained,
)
HEADS = head_map(
    lambda params: params.whole_share > 0,
    "set whole_share=0, which needs none",
    needle=lambda params: params.whole_by == "needle",
)
