"""One step of the training of SeKV's router, its evaluation and its checkpoint (SeKV sec. 3.3, eq. 10 to 15).

What the paper leaves open and we decided: all positions of a document's suffix are trained, the spans come from its
prefix; a position of a head is mined when its `strongest` spans hold at least `concentration` of its attention; losses
are means (losses.py)."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlens.engine.hf_attention import attending
from kvlens.lab.training.sekv import losses
from kvlens.lab.training.sekv.batch import Batch, join
from kvlens.lab.training.sekv.examples import Example
from kvlens.lab.training.sekv.seam import ATTENTION
from kvlens.lab.training.sekv.settings import SeKVTraining
from kvlens.lab.training.sekv.student import Pass, RouterModule
from kvlens.lab.training.sekv.windows import Windows
from kvlens.methods.sekv import router as sekv_router
from kvlens.methods.sekv.params import SeKVParameters


class Trainer:
    """Owns the module, its optimizer, the step and the best state so far."""

    def __init__(
        self,
        model: PreTrainedModel,
        params: SeKVParameters,
        settings: SeKVTraining,
        steps: int,
        start: Tensor,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """start: W to begin with [L, H, d', D]. progress: called as places are prepared."""
        torch.manual_seed(settings.seed)
        self.model, self.params, self.settings, self.steps = model, params, settings, steps
        self.module = RouterModule(start, params.max_rank, settings.tau, settings.open_gates).to(start.device)
        groups = [
            {"params": [self.module.weight, self.module.tau], "share": 1.0},
            {"params": list(self.module.gates.parameters()), "share": settings.gate_rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay)
        self.step, self.stale, self.best, self.best_step = 0, 0, math.inf, 0
        self.windows = Windows(model, params, settings, progress)
        self.seconds = 0.0
        """spent in training so far, over all calls"""
        self.best_state = self._copy()

    def _copy(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def budget_weight(self) -> float:
        """lambda_3, annealed from 0 over the first half of the training."""
        return self.settings.lambda_budget * min(1.0, 2 * self.step / self.steps)

    def rate(self) -> float:
        """Learning rate of the current step."""
        warm = max(1, round(self.settings.warmup * self.steps))
        if self.step < warm:
            return self.settings.learning_rate * (self.step + 1) / warm
        return (
            self.settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (self.step - warm) / max(1, self.steps - warm)))
        )

    def loss(self, examples: Sequence[Example], budget_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective (eq. 10) of each of some documents of one length [B], and figures of each [B]: its parts, the
        zoom rate and how well expansion covers the targets."""
        s, batch = self.settings, join(examples)
        trip = Pass(batch, self.module, s.exponent)
        with attending(self.model, ATTENTION):
            logits = self.model(
                input_ids=batch.suffix_ids, position_ids=batch.position_ids, use_cache=False, sekv=trip
            ).logits
        score, z = torch.stack(trip.scores), torch.stack(trip.zooms)
        sigma = (batch.key_factors[1], batch.value_factors[1])
        target = losses.coverage_set(batch.mass, s.rho)
        own_rows = losses.mined(batch.mass, s.concentration, s.strongest)
        parts = {
            "distill": losses.distillation(batch.teacher, logits),
            "zoom": losses.zoom(score, target, own_rows, batch.is_span, s.w_plus),
            "recon": losses.reconstruction(trip.gates, sigma, batch.energy, batch.is_span),
            "budget": losses.budget(z, trip.gates, s.beta, batch.is_span, batch.has_rank),
        }
        whole = (
            parts["distill"]
            + s.lambda_zoom * parts["zoom"]
            + s.lambda_recon * parts["recon"]
            + budget_weight * parts["budget"]
        )
        figures = parts | {"loss": whole} | _shares(batch, z, target, own_rows, trip.gates)
        return whole, {name: value.detach() for name, value in figures.items()}

    def advance(self, documents: Sequence[Sequence[int]]) -> dict[str, float]:
        """One optimizer step; the documents it draws depend on seed and step only."""
        rng = random.Random(self.settings.seed * 1_000_003 + self.step)
        length = self.settings.lengths[
            min(self.step * len(self.settings.lengths) // self.steps, len(self.settings.lengths) - 1)
        ]
        self.optimizer.zero_grad(set_to_none=True)
        rows: list[dict[str, Tensor]] = []
        examples = self.windows.draw(documents, length, self.settings.batch, rng, held_out=False)
        for part in _groups(examples, self.settings.together):
            loss, figures = self.loss(part, self.budget_weight())
            (loss.sum() / self.settings.batch).backward()  # type: ignore[no-untyped-call]
            rows.append(figures)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate() * group["share"]
        self.optimizer.step()
        with torch.no_grad():
            self.module.tau.clamp_(1e-4, 1 - 1e-4)
        self.step += 1
        return {"step": self.step, "length": length, "lr": self.rate(), **_mean(rows)}

    @torch.no_grad()
    def evaluate(self, documents: Sequence[Sequence[int]]) -> dict[str, float]:
        """The objective with the whole budget weight on the same held-out documents every time; keeps the best
        state."""
        rng = random.Random(self.settings.seed + 1)
        count, length = self.settings.evaluate_on, self.settings.lengths[-1]
        rows: list[dict[str, Tensor]] = []
        for part in _groups(self.windows.draw(documents, length, count, rng, held_out=True), self.settings.together):
            rows.append(self.loss(part, self.settings.lambda_budget)[1])
        figures = _mean(rows)
        if figures.get("loss", math.inf) < self.best:
            self.best, self.best_step, self.best_state, self.stale = figures["loss"], self.step, self._copy(), 0
        elif 2 * self.step >= self.steps:
            self.stale += 1
        return {f"held_out_{name}": value for name, value in figures.items()}

    def save(self, path: Path) -> None:
        """Write the checkpoint whole or not at all."""
        state = {name: getattr(self, name) for name in ("step", "stale", "best", "best_step", "best_state", "seconds")}
        torch.save(
            state | {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()},
            path.with_suffix(".tmp"),
        )
        path.with_suffix(".tmp").replace(path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.module.load_state_dict(state.pop("module"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        for name, value in state.items():
            setattr(self, name, value)

    def router(self, provenance: dict[str, Any]) -> sekv_router.Router:
        """The best state as a router; without gates where no step trained them."""
        best = copy.deepcopy(self.module)
        best.load_state_dict(self.best_state)
        threshold = sekv_router.logit(best.tau.detach())
        return sekv_router.Router(
            "trained", best.weight.detach(), threshold, best.gates if self.steps else None, provenance
        )


def _groups(examples: Sequence[Example], size: int) -> list[Sequence[Example]]:
    return [examples[i : i + size] for i in range(0, len(examples), size)]


def _shares(
    batch: Batch, z: Tensor, target: Tensor, own_rows: Tensor, gates: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Return of each document [B]: expanded share, mined share, the targets' share at mined positions, the expanded
    share of these, and ranks."""
    is_span = batch.is_span[:, None, None]
    expanded, wishes = (z.detach() > 0.5) & is_span, target & own_rows[..., None] & is_span
    rows, targets = own_rows.sum((0, 2, 3)), wishes.sum((0, 2, 3, 4))
    spans = batch.is_span.sum(-1)
    return {
        "zoom_rate": expanded.sum((0, 2, 3, 4)) / (own_rows[:, 0].numel() * spans),
        "mined": rows / own_rows[:, 0].numel(),
        "target_rate": targets / (rows * spans),
        "hit_rate": (expanded & wishes).sum((0, 2, 3, 4)) / targets,
        "rank_k": losses.mean_rank(gates[0], batch.is_span, batch.has_rank),
        "rank_v": losses.mean_rank(gates[1], batch.is_span, batch.has_rank),
    }


def _mean(groups: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Return the mean of each figure over the documents in which it is a number."""
    if not groups:
        return {}
    table = torch.cat([torch.stack(list(group.values())) for group in groups], 1).nanmean(1)
    return dict(zip(groups[0], table.tolist(), strict=True))
