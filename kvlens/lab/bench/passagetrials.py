"""The trials of one passage of free text: what they share, and the figures of each arm.

Trials of a passage may share their decode steps; full KV, which all are compared with, is computed alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.lab.bench.passages import passage
from kvlens.lab.bench.textrequest import FreeTextRequest, Planned
from kvlens.lab.bench.trials import arm, chosen, infeasible, settings
from kvlens.methods.base import Method
from kvlens.studies.means import Means
from kvlens.text.prompts import Prompt

if TYPE_CHECKING:
    from kvlens.engine.batch import Seat
    from kvlens.engine.comparison import Reference
    from kvlens.engine.engine import Engine, Options
    from kvlens.engine.models import LoadedModel
    from kvlens.engine.prefill import ReadPrompt


class Passages:
    """The passage that is being measured, with what all its trials share: the reading of it, and full KV's logits."""

    def __init__(self, request: FreeTextRequest, engine: Engine) -> None:
        self.request, self.engine = request, engine
        self._others: dict[str, LoadedModel] = {}
        self._index = -1
        self.context: Prompt
        self.options: Options
        self.reference: Reference
        self._read: ReadPrompt | None

    def turn(self, index: int) -> None:
        """Make passage `index` the one at hand."""
        import torch

        from kvlens.engine.comparison import Reference
        from kvlens.engine.engine import Options
        from kvlens.methods.full import FullKV

        if index == self._index:
            return
        loaded = self.engine.loaded
        request = self.request
        seed, sizes = request.first_seed + index, (request.length, request.tokens)
        self.context, fed = passage(seed, *sizes, loaded.tokenizer, loaded.max_positions)
        self.options = Options(max_new=len(fed), forced=fed, coverage=True, oracle="off")
        self._read, self._index = None, index
        read = self.read(FullKV)
        plain = replace(self.options, coverage=False)
        full = self.engine.run(self.context, FullKV, FullKV.Parameters(), None, plain, keep_logits=True, read=read)
        self.reference = Reference("", fed, torch.stack(full.logits).cpu())

    def read(self, method: type[Method]) -> ReadPrompt:
        """The context, prefilled once for all methods that can be served by it."""
        if self._read is None or not self._read.serves(method):
            asking = (*map(methods.get, self.request.methods), method)
            queries = max(128, *(method.needs.queries for method in asking))
            received = any(method.needs.received for method in asking)
            self._read = self.engine.read(self.context, queries=queries, received=received)
        return self._read

    def run(self, name: str, budget: str, dtype: str = "float32", seat: Seat | None = None) -> dict[str, Any]:
        """The figures of one arm, under the parameters that a run of it would have; `infeasible` where the budget
        cannot be kept, `refused` (a sentence) where the method lacks figures of the model. seat: its place among arms
        whose steps are computed together."""
        method = methods.get(name)
        preset, overrides, rule = settings(method, self.request.model, budget)
        row: dict[str, Any] = {"rule": rule, "preset": preset, "overrides": overrides}
        limit = Budget.parse(budget) if rule == "resident bytes" else None
        engine = self._engine(dtype, seat)
        read = self.read(method) if dtype == "float32" else None
        sink = Means()
        try:
            choice = chosen(engine, self.context, method, row, limit, self.options)
            row |= arm(choice, row)
            result = engine.run(
                self.context, method, choice.params, limit, self.options, sink, read=read, against=self.reference
            )
        except BudgetInfeasible as error:
            return row | infeasible(error)
        except ValueError as error:
            return row | {"refused": str(error)}
        losses = [loss for loss in result.losses if loss is not None]
        assert len(losses) == len(self.reference.ids), "every forced token is compared"
        figures = sink.figures()
        full = engine.loaded.shape.full_kv_bytes(len(self.context.ids) + self.options.max_new)
        return row | {
            "kl": fmean(loss.kl for loss in losses),
            "agreement": fmean(loss.agrees for loss in losses),
            "nats": -fmean(loss.logprob for loss in losses),
            "full_nats": -fmean(loss.ref_logprob for loss in losses),
            "coverage": figures["coverage"],
            "selection_recall": figures["selection_recall"],
            "attended_share": figures["attended_tokens"] / len(self.context.ids),
            "resident_share": result.peak_bytes / full,
            "read_share": figures["read_bytes_per_step"] / full,
            "tokens": len(losses),
            "batched": result.most_rows,
            "passed": all(check.passed for check in result.checks),
        }

    def _engine(self, dtype: str, seat: Seat | None) -> Engine:
        from kvlens.engine.engine import Engine
        from kvlens.engine.models import load

        if dtype == "float32":
            return self.engine.seated(seat)
        if dtype not in self._others:
            self._others[dtype] = load(self.request.model, dtype=dtype)
        return Engine(self._others[dtype], seat)


@dataclass(frozen=True)
class Place:
    """Runs arms of the passage at hand, one after the other, at a place among those that share their steps."""

    passages: Passages
    seat: Seat | None

    @classmethod
    def at(cls, passages: Passages, seat: Seat | None) -> Place:
        """Take a place; None: each arm decodes alone. Raises Refusal `batch_rotary`, so that no arm keeps it."""
        if seat is not None:
            seat.check(passages.engine.loaded)
        return cls(passages, seat)

    def run(self, planned: Planned) -> tuple[Planned, dict[str, Any]]:
        """Return the arm with its figures."""
        return planned, self.passages.run(planned.method, planned.budget, planned.dtype, self.seat)

    def end_prompt(self) -> None:
        """The passage stays: the next arm is of it too."""
