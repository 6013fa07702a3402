"""W by the zoom loss alone (eq. 12 and 13), before the whole objective; ours.

The zoom loss asks for the teacher's queries and nothing of the student or of the thresholds, so one pass of the model
says of many positions which spans their heads look at, and a step costs a fiftieth of one of the whole objective.

Shapes: L layers, H query heads, H_kv KV heads, D head size, T positions, S spans, d' routing dimension.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlens.lab.training.sekv import losses
from kvlens.lab.training.sekv.examples import Read, draw, read
from kvlens.lab.training.sekv.settings import SeKVTraining
from kvlens.methods.sekv import router as sekv_router
from kvlens.methods.sekv.params import SeKVParameters


@dataclass(frozen=True)
class Looks:
    """Where the heads of a model look in one document."""

    query: Tensor
    """of the last T positions, float16 [L, H, T, D]"""
    mean_keys: Tensor
    """[L, H_kv, S, D]"""
    mass: Tensor
    """the teacher's attention on every span, float16 [L, H, T, S]"""
    length: Tensor
    """float [S], tokens"""


@torch.no_grad()
def looks(model: PreTrainedModel, ids: Sequence[int], params: SeKVParameters, suffix: int, cap: int) -> Looks | None:
    """Of a document, at its last `suffix` positions. None when no span lies before them."""
    results = read(model, ids, suffix, params, cap)
    return None if results is None else looks_of(results, params)


def looks_of(results: Read, params: SeKVParameters) -> Looks:
    """Of a document that was read."""
    return Looks(results.query.half(), results.means(params)[0], results.mass().half(), results.length)


def scores(weight: Tensor, query: Tensor, mean_keys: Tensor, length: Tensor) -> Tensor:
    """Eq. 5 for all layers and heads [L, H, T, S]: weight [L, H, d', D], query [L, H, T, D], mean_keys [L, H_kv, S,
    D]."""
    alive = torch.ones(length.shape, dtype=torch.bool, device=length.device)
    return torch.stack(
        [
            sekv_router.scores(sekv_router.route(w, q), sekv_router.summaries(w, k), length, alive)
            for w, q, k in zip(weight, query, mean_keys, strict=True)
        ]
    )


def learn(
    start: Tensor,
    visited: Sequence[Looks],
    settings: SeKVTraining,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> Tensor:
    """W [L, H, d', D] from `start`, in `routing_steps` steps of one document and `suffix` of its positions each."""
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=settings.routing_rate)
    rng = random.Random(f"{settings.seed}/routing")
    for step in range(settings.routing_steps):
        document = visited[rng.randrange(len(visited))]
        positions = document.query.shape[2]
        sample = torch.tensor(rng.sample(range(positions), min(settings.suffix, positions)), device=start.device)
        mass = document.mass[:, :, sample].float()
        score = scores(weight, document.query[:, :, sample].float(), document.mean_keys, document.length)
        loss = zoom_loss(score, mass, settings)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = settings.routing_rate * min(1.0, (step + 1) / 20) * (1 - step / settings.routing_steps)
        optimizer.step()
        if progress and (step + 1) % 100 == 0:
            progress({"routing_step": step + 1, "of": settings.routing_steps, "zoom": float(loss.detach())})
    return weight.detach()


def zoom_loss(score: Tensor, mass: Tensor, settings: SeKVTraining) -> Tensor:
    """Return eq. 13 for the scores and the teacher's attention [L, H, T, S] of one document."""
    target = losses.coverage_set(mass, settings.rho)
    own_rows = losses.mined(mass, settings.concentration, settings.strongest)
    spans = torch.ones(1, mass.shape[-1], dtype=torch.bool, device=mass.device)
    return losses.zoom(score[:, None], target[:, None], own_rows[:, None], spans, settings.w_plus)[0]


def learned(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    start: Tensor,
    params: SeKVParameters,
    settings: SeKVTraining,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> Tensor:
    """As `learn`, on `routing_windows` places of `documents` as long as the first of the lengths. Raises ValueError
    when none of them has a span."""
    length, visited = settings.lengths[0], []
    for place in range(settings.routing_windows):
        ids = draw(documents, length, random.Random(f"{settings.seed}/routing/{place}"))
        results = looks(
            model, ids, params, settings.routing_suffix, int(params.anchor_share * settings.budget * length)
        )
        if results is not None:
            visited.append(results)
        if progress:
            progress({"routing_window": place + 1, "of": settings.routing_windows})
    if not visited:
        raise ValueError(f"no place of {length} tokens has a span before its last {settings.routing_suffix}.")
    return learn(start, visited, settings, progress)
