"""Finds the trained router that SeKV's parameters ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvlens import REPOSITORY
from kvlens.methods.base import RunContext
from kvlens.methods.sekv.params import SeKVParameters

if TYPE_CHECKING:
    from kvlens.methods.sekv.router import Router


def trained_router(params: SeKVParameters, context: RunContext) -> Router:
    """The trained router the parameters ask for. Raises ValueError with what to do when there is none that fits."""
    from kvlens.methods.sekv.router import load_router

    shipped = REPOSITORY / "kvlens" / "demo" / "sekv_router.safetensors"
    if not params.router_file and context.model_name != "demo":
        raise ValueError(
            f"no trained SeKV router for '{context.model_name}': train one (kvlens train sekv) and name it in "
            f"router_file, "
            "or use router=pca, which needs no training."
        )
    path = Path(params.router_file).expanduser() if params.router_file else shipped
    if not path.is_file():
        raise ValueError(f"the SeKV router '{params.router_file or path.name}' does not exist; router=pca needs none.")
    router = load_router(path, context.shape.layers, context.shape.q_heads, context.shape.head_dim)
    if router.weight.shape[2] != params.dim:
        raise ValueError(
            f"{path.name} routes in {router.weight.shape[2]} dimensions, the parameter dim is {params.dim}."
        )
    if router.gates is not None and router.gates.max_rank < params.max_rank:
        raise ValueError(
            f"{path.name} has gates for {router.gates.max_rank} ranks, the parameter max_rank is {params.max_rank}."
        )
    return router
