"""One step of the training of SeKV's router, its evaluation and its checkpoint (SeKV sec. 3.3, eq. 10 to 15).

What the paper leaves open and we decided: all positions of a document's suffix are trained, the spans come from its
prefix; a position of a head is mined when its `strongest` spans hold at least `concentration` of its attention; losses
are means (losses.py)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlens.engine.hf_attention import attending
from kvlens.lab.training.sekv import losses
from kvlens.lab.training.sekv.examples import Example, draw, prepare
from kvlens.lab.training.sekv.settings import SeKVTraining
from kvlens.lab.training.sekv.student import ATTENTION, Pass, RouterModule
from kvlens.methods.sekv import router as sekv_router
from kvlens.methods.sekv.params import SeKVParameters


class Trainer:
    """Owns the module, its optimizer, the step and the best state so far."""

    def __init__(
        self, model: PreTrainedModel, params: SeKVParameters, settings: SeKVTraining, steps: int, start: Tensor
    ) -> None:
        """start: W to begin with [L, H, d', D]."""
        torch.manual_seed(settings.seed)
        self.model, self.params, self.settings, self.steps = model, params, settings, steps
        self.module = RouterModule(start, params.max_rank, settings.tau, settings.open_gates).to(start.device)
        groups = [
            {"params": [self.module.weight, self.module.tau], "share": 1.0},
            {"params": list(self.module.gates.parameters()), "share": settings.gate_rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay)
        self.step, self.stale, self.best, self.best_step = 0, 0, math.inf, 0
        self._seen: dict[tuple[int, int, bool], Example | None] = {}
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

    def _draw(
        self, documents: Sequence[Sequence[int]], length: int, rng: random.Random, held_out: bool
    ) -> Example | None:
        """A place of the documents: any, or one of the `windows` that are kept."""
        if not self.settings.windows:
            return drawn(self.model, documents, length, self.params, self.settings, rng)
        index = length, rng.randrange(self.settings.windows), held_out
        if index not in self._seen:
            place = random.Random(f"{self.settings.seed}/{index}")
            self._seen[index] = drawn(self.model, documents, length, self.params, self.settings, place)
        return self._seen[index]

    def loss(self, example: Example, budget_weight: float) -> tuple[Tensor, dict[str, float]]:
        """The objective of one document (eq. 10) and its parts, with the zoom rate and how well expansion covers the
        targets."""
        s = self.settings
        trip = Pass(s.suffix, example.prefix, self.module, s.exponent)
        with attending(self.model, ATTENTION):
            logits = self.model(
                input_ids=example.suffix_ids, position_ids=example.position_ids, use_cache=False, sekv=trip
            ).logits[0]
        score, z = torch.stack(trip.scores), torch.stack(trip.zooms)
        gates = (torch.stack([g[0] for g in trip.gates]), torch.stack([g[1] for g in trip.gates]))
        sigma = (example.prefix.key_factors[1], example.prefix.value_factors[1])
        target, own_rows = (
            losses.coverage_set(example.mass, s.rho),
            losses.mined(example.mass, s.concentration, s.strongest),
        )
        parts = {
            "distill": losses.distillation(example.teacher, logits),
            "zoom": losses.zoom(score, target, own_rows, s.w_plus),
            "recon": losses.reconstruction(gates, sigma, example.prefix.energy),
            "budget": losses.budget(z, gates, s.beta),
        }
        whole = (
            parts["distill"]
            + s.lambda_zoom * parts["zoom"]
            + s.lambda_recon * parts["recon"]
            + budget_weight * parts["budget"]
        )
        expanded = z.detach() > 0.5
        figures = {name: float(value.detach()) for name, value in parts.items()} | {
            "zoom_rate": float(expanded.float().mean()),
            "mined": float(own_rows.float().mean()),
            "target_rate": float(target[own_rows].float().mean()) if own_rows.any() else math.nan,
            "hit_rate": float(expanded[own_rows][target[own_rows]].float().mean()) if own_rows.any() else math.nan,
            "rank_k": float(gates[0].detach().sum(-1).mean()),
            "rank_v": float(gates[1].detach().sum(-1).mean()),
        }
        return whole, figures

    def advance(self, documents: Sequence[Sequence[int]]) -> dict[str, float]:
        """One optimizer step; the documents it draws depend on seed and step only."""
        rng = random.Random(self.settings.seed * 1_000_003 + self.step)
        length = self.settings.lengths[
            min(self.step * len(self.settings.lengths) // self.steps, len(self.settings.lengths) - 1)
        ]
        self.optimizer.zero_grad(set_to_none=True)
        rows: list[dict[str, float]] = []
        for _ in range(self.settings.batch):
            example = self._draw(documents, length, rng, held_out=False)
            if example is not None:
                loss, figures = self.loss(example, self.budget_weight())
                (loss / self.settings.batch).backward()
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
        visited = []
        for _ in range(self.settings.evaluate_on):
            example = self._draw(documents, self.settings.lengths[-1], rng, held_out=True)
            if example is not None:
                loss, figures = self.loss(example, self.settings.lambda_budget)
                visited.append({"loss": float(loss), **figures})
        figures = _mean(visited)
        if figures.get("loss", math.inf) < self.best:
            self.best, self.best_step, self.best_state, self.stale = figures["loss"], self.step, self._copy(), 0
        elif 2 * self.step >= self.steps:
            self.stale += 1
        return {f"held_out_{name}": value for name, value in figures.items()}

    def save(self, path: Path) -> None:
        """Write the checkpoint whole or not at all."""
        state = {name: getattr(self, name) for name in ("step", "stale", "best", "best_step", "best_state")}
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
        self.module.load_state_dict(self.best_state)
        return sekv_router.Router(
            "trained",
            self.module.weight.detach(),
            sekv_router.logit(self.module.tau.detach()),
            self.module.gates if self.steps else None,
            provenance,
        )


def drawn(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    length: int,
    params: SeKVParameters,
    settings: SeKVTraining,
    rng: random.Random,
) -> Example | None:
    """A place of a document with what the model makes of it; None where no span lies outside the window."""
    cap = int(params.anchor_share * settings.budget * length)
    return prepare(model, draw(documents, length, rng), settings.suffix, params, cap)


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each figure over the rows in which it is a number."""
    names = rows[0] if rows else {}
    kept_tokens = {name: [row[name] for row in rows if not math.isnan(row[name])] for name in names}
    return {name: sum(values) / len(values) if values else math.nan for name, values in kept_tokens.items()}
