"""Free text as a measure: a method is fed the very words of a real text behind a context, and each next-token
distribution is compared with full KV's. No task, no answer, no luck of one token.

Controls stand in the same table: full KV in other number formats (what rounding alone changes, the noise floor), and
random eviction among the methods. Resumable; one line per trial is kept.

It is no study of kvlens.studies: its noise floor compares other number formats with float32's full KV, and a study
compares an arm with full KV in the arm's own format.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from inspect import getfile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.lab.bench import kept as lines_kept
from kvlens.lab.bench.passages import distinct, passage
from kvlens.lab.bench.provenance import about, made_otherwise, origin
from kvlens.lab.bench.tablerequest import ComparedRequest
from kvlens.lab.bench.trials import arm, chosen, infeasible, missing, settings
from kvlens.methods.base import Method
from kvlens.statistics import of_mean
from kvlens.studies.means import Means
from kvlens.tasks.texts import EVALUATION

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference
    from kvlens.engine.engine import Engine, Options
    from kvlens.engine.prefill import ReadPrompt
from kvlens.text.prompts import Prompt

FLOORS = ("bfloat16", "float16")
FIGURES = (
    "kl",
    "agreement",
    "nats",
    "full_nats",
    "coverage",
    "selection_recall",
    "attended_share",
    "resident_share",
    "read_share",
)
"""of an arm, means over its passages"""


class FreeTextRequest(ComparedRequest):
    """What to measure; the reference stands for full KV in other number formats."""

    budgets: tuple[str, ...] = ("10%", "20%", "40%")
    length: int = Field(1024, ge=64)
    """tokens of context"""
    tokens: int = Field(64, ge=64)
    """fed behind it, each of them compared"""
    passages: int = Field(10, ge=1)
    first_seed: int = 7_000_000

    def arms(self) -> list[tuple[str, str, str]]:
        """(method, budget, number format) that every passage is run under beside its reference."""
        floors = [(methods.REFERENCE, "", dtype) for dtype in FLOORS]
        return floors + [
            (name, budget, "float32") for name in self.methods if name != methods.REFERENCE for budget in self.budgets
        ]


class Passages:
    """The passage that is being measured, with what all its trials share: the reading of it, and full KV's logits."""

    def __init__(self, request: FreeTextRequest, engine: Engine) -> None:
        self.request, self.engine = request, engine
        self._others: dict[str, Engine] = {}
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

    def run(self, name: str, budget: str, dtype: str = "float32") -> dict[str, Any]:
        """The figures of one arm, under the parameters that a run of it would have; `infeasible` where the budget
        cannot be kept, `refused` (a sentence) where the method lacks figures of the model."""
        method = methods.get(name)
        preset, overrides, rule = settings(method, self.request.model, budget)
        row: dict[str, Any] = {"rule": rule, "preset": preset, "overrides": overrides}
        limit = Budget.parse(budget) if rule == "resident bytes" else None
        engine = self.engine if dtype == "float32" else self._in(dtype)
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
            "passed": all(check.passed for check in result.checks),
        }

    def _in(self, dtype: str) -> Engine:
        from kvlens.engine.engine import Engine
        from kvlens.engine.models import load

        if dtype not in self._others:
            self._others[dtype] = Engine(load(self.request.model, dtype=dtype))
        return self._others[dtype]


@lines_kept.alone
def measure(
    request: FreeTextRequest,
    kept: Path,
    report: Callable[[int, int, dict[str, Any]], None],
    say: Callable[[str], None] = lines_kept.silent,
) -> dict[str, Any]:
    """Run what is not in `kept` (one JSON line per trial) yet -> the table with its provenance. report(done, total,
    row); say(line) where kept trials are run again. Raises ValueError for a file that does not hold trials."""
    import torch

    from kvlens.engine.engine import Engine
    from kvlens.engine.models import load

    torch.set_num_threads(1)
    named = {methods.REFERENCE, *request.methods}
    sources = Path(__file__), Path(getfile(passage))  # they decide what a trial is, too
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    shared = request.first_seed, request.length, request.tokens, EVALUATION.sha256, digest
    origins = {name: origin(request.model, name, "text", *shared) for name in named}
    arms = request.arms()
    planned = {
        f"{index}/{method}/{budget}/{dtype}": (index, method, budget, dtype)
        for index in distinct(request.first_seed, request.passages)
        for method, budget, dtype in arms
    }
    stored_rows = lines_kept.read(kept, ("key", "method", "origin", "dtype"), lambda row: row["key"] in planned)
    if line := made_otherwise(stored_rows, origins):
        say(line)
    for line in missing(request.model, request.methods):
        say(line)
    rows = {row["key"]: row for row in stored_rows if row["origin"] == origins[row["method"]]}
    passages, start_time = Passages(request, Engine(load(request.model))), time.monotonic()
    for count, (key, (index, method, budget, dtype)) in enumerate(planned.items(), 1):
        if key in rows:
            continue
        if time.monotonic() - start_time > 60 * request.minutes:
            break
        passages.turn(index)
        row = {"key": key, "index": index, "method": method, "budget": budget, "dtype": dtype}
        rows[key] = row | passages.run(method, budget, dtype) | {"origin": origins[method]}
        lines_kept.append(kept, rows[key])
        report(count, len(planned), rows[key])
    provenance = about(tuple(sorted(named)), request.model) | {
        "request": request.model_dump(mode="json"),
        "text": EVALUATION.title,
        "origins": origins,
        "trials": len(rows),
        "planned": len(planned),
    }
    return {"about": provenance, "lines": [_line(arm, list(rows.values())) for arm in arms]}


def _line(arm: tuple[str, str, str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One arm: means over passages, which have equally many tokens; of KL its 95 % interval."""
    arm_rows = [row for row in rows if (row["method"], row["budget"], row["dtype"]) == arm]
    complete, short = (
        [row for row in arm_rows if "kl" in row],
        [row["infeasible"] for row in arm_rows if "infeasible" in row],
    )
    line: dict[str, Any] = dict(zip(("method", "budget", "dtype"), arm, strict=True)) | {"n": len(complete)}
    line["presets"] = dict(Counter(row.get("preset") or "defaults" for row in arm_rows))
    line |= {name: fmean(row[name] for row in complete) if complete else None for name in FIGURES}
    low, high = of_mean([row["kl"] for row in complete]) or (None, None)
    line |= {"kl_low": low, "kl_high": high, "failed_self_checks": sum(not row["passed"] for row in complete)}
    line["refused"] = next((row["refused"] for row in arm_rows if "refused" in row), None)
    return line | {"smallest_feasible": fmean(short) if short else None}
