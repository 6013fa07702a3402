"""Checks one method on every case: `kvlens check-method`. A truth that fails reports its smallest case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kvlens.budget import Budget, BudgetInfeasible
from kvlens.checking import truths
from kvlens.checking.cases import NEW, Case, cases
from kvlens.checking.models import RecordList
from kvlens.checking.stock import generated, stock_logits
from kvlens.checking.truths import Mismatch
from kvlens.engine.engine import Result
from kvlens.methods.base import Method
from kvlens.methods.faults import MethodFault

CHUNK = 7
"""prompt tokens that the model reads at once where reading in chunks is checked"""
CHUNK_ERROR = 1e-3
"""largest logit difference between reading in chunks and at once: matrix products of other shapes round differently"""
CODE_ERROR = 3e-2
"""the same for a method that attends quantised tokens: a difference in a number's last bit can move it to the next
code, which is as far away as the bits are few. One code of a turned key, 1.5e-8 from its border, moved a logit by
0.011"""
TRUTHS = {
    "reference": "full KV equals the stock model and its generate()",
    "needs": "hooks and needs agree",
    "hooks": "hooks return what they promise",
    "unlimited": "without a budget it equals full KV, or its logits are finite where it is not exact",
    "recorded": "a recorded run equals an unrecorded one",
    "chunks": "a prompt read in chunks equals a prompt read at once",
    "masses": "masses add up to 1, and no row is missing",
    "spans": "every position is in one span",
    "ledger": "bytes in the ledger equal the bytes moved",
    "bytes": "resident and read bytes of KV heads add up",
    "budget": "the budget holds at every step",
    "floor": "a refused budget names the smallest feasible one, or one that runs where the floor is an estimate",
    "repeat": "the same seed gives the same trace",
    "self-checks": "the self-checks of a run pass",
}
"""truth -> what it says, in the order of the report"""


@dataclass(frozen=True)
class Failure:
    """The smallest case in which a truth fails."""

    model: str
    prompt_tokens: int
    budget: str
    mismatch: Mismatch

    def __str__(self) -> str:
        wrong = self.mismatch
        places = (("step", wrong.step), ("layer", wrong.layer), ("head", wrong.head))
        where = [f"{name} {number}" for name, number in places if number is not None]
        case = ", ".join([self.model, f"{self.prompt_tokens} prompt tokens", f"budget {self.budget}", *where])
        return f"{case}: expected {wrong.expected}, got {wrong.actual}"


@dataclass
class Finding:
    """What the cases say of a truth."""

    truth: str
    cases: int = 0
    failure: Failure | None = None

    @property
    def status(self) -> str:
        """pass, FAIL, or none if no case ran."""
        return "FAIL" if self.failure else "pass" if self.cases else "none"


@dataclass
class Report:
    """All truths on one method."""

    method: str
    findings: dict[str, Finding] = field(default_factory=lambda: {truth: Finding(truth) for truth in TRUTHS})
    refused: list[str] = field(default_factory=list)
    """cases that the method refuses, a sentence each"""

    @property
    def passed(self) -> bool:
        """True if a case ran and no truth failed."""
        statuses = {finding.status for finding in self.findings.values()}
        return "FAIL" not in statuses and self.findings["hooks"].cases > 0

    def plain(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        rows = [
            {"truth": row.truth, "says": TRUTHS[row.truth], "status": row.status, "cases": row.cases}
            | {"failure": None if row.failure is None else asdict(row.failure)}
            for row in self.findings.values()
        ]
        return {"method": self.method, "passed": self.passed, "truths": rows, "refused": self.refused}


def check_method(method: type[Method], progress: Callable[[Case], None] = lambda case: None) -> Report:
    """Run every case under the method and compare. progress(case) is called before each. Raises nothing of the
    method's: a fault of a hook fails the truth `hooks`."""
    report = Report(method.name)
    declared = _undeclared(method)
    report.findings["needs"].cases = 1
    if declared is not None:
        report.findings["needs"].failure = Failure("no model", 0, "none", declared)
    for case in cases(method):
        progress(case)
        try:
            for truth, mismatch in _checked(case):
                _note(report, truth, case, mismatch)
        except MethodFault as fault:
            place = Mismatch(fault.expected or "no fault", str(fault), fault.step, fault.layer)
            _note(report, "hooks", case, place)
        except ValueError as refusal:
            report.refused.append(f"{case.model.name}, {case.prompt_tokens} prompt tokens: {refusal}")
    return report


def _note(report: Report, truth: str, case: Case, mismatch: Mismatch | None) -> None:
    finding = report.findings[truth]
    finding.cases += 1
    if mismatch is not None and finding.failure is None:
        budget = case.__dict__.get("budget")
        budget_text = budget.text if isinstance(budget, Budget) else "none"
        finding.failure = Failure(case.model.name, case.prompt_tokens, budget_text, mismatch)


def _undeclared(method: type[Method]) -> Mismatch | None:
    """Compare the hooks that a class overrides with the needs that switch them on."""
    if method.attended is not Method.attended and not method.needs.weights:
        return Mismatch("needs = Needs(weights=True), since the class has the hook `attended`", "no such need")
    has_own_needs = method.needs_with.__func__ is not Method.needs_with.__func__  # type: ignore[attr-defined]
    if method.reading is not Method.reading and not (method.needs.reading or has_own_needs):
        return Mismatch("needs = Needs(reading=True), since the class has the hook `reading`", "no such need")
    return None


def _checked(case: Case) -> Iterator[tuple[str, Mismatch | None]]:
    """Yield each truth with its mismatch in the case."""
    loaded, budget, sink, again = case.model.engine.loaded, case.budget, RecordList(), RecordList()
    yield "reference", _reference(case)
    recorded, plain = case.run(budget, sink), case.run(budget)
    yield "hooks", truths.finite_logits(recorded.logits)
    yield "recorded", truths.same_logits(recorded.logits, plain.logits)
    shared = None if case.method.needs_with(case.held).own_prompt else case.read
    case.run(budget, again, read=shared)
    yield "repeat", truths.same_trace(sink, again)
    yield "masses", truths.masses_add_up(sink.steps, loaded.shape)
    yield "spans", truths.spans_partition(sink)
    yield "ledger", truths.ledger_bytes(sink)
    yield "bytes", truths.bytes_add_up(sink.steps, loaded.shape)
    failed = next((check for check in recorded.checks if not check.passed), None)
    yield "self-checks", None if failed is None else Mismatch(failed.name, failed.detail)
    if budget is not None:
        limit = budget.bytes(loaded.shape, len(case.prompt.ids) + NEW)
        yield "budget", None if limit is None else truths.within_budget(sink.steps, limit)
        yield "floor", _floor(case)
    if loaded.model.dtype == torch.float32:
        yield "chunks", _chunks(case, recorded, sink)
    yield "unlimited", _unlimited(case)


def _reference(case: Case) -> Mismatch | None:
    """Compare full KV with the stock model, once per prompt and model."""
    ours, loaded = case.full, case.model.engine.loaded
    fed = [case.prompt.ids[-1], *ours.ids[:-1]]
    stock = stock_logits(loaded.model, case.prompt.ids, fed)
    wrong = truths.same_logits(stock, ours.logits)
    if wrong is not None or loaded.model.dtype != torch.float32:
        return wrong
    tokens = generated(loaded.model, case.prompt.ids, NEW)
    same = tokens == ours.ids[: len(tokens)]
    return None if same else Mismatch(f"the tokens of generate(), {tokens}", str(ours.ids))


def _chunks(case: Case, whole: Result, records: RecordList) -> Mismatch | None:
    """Compare with the same prompt read in chunks, on the same tokens."""
    has_codes = any(bool(record.head["mass_quantised"].any()) for record in records.steps)
    forced = tuple(whole.ids)
    chunked = case.run(case.budget, chunk=CHUNK, forced=forced)
    return truths.same_logits(whole.logits, chunked.logits, CODE_ERROR if has_codes else CHUNK_ERROR)


def _unlimited(case: Case) -> Mismatch | None:
    """Compare with full KV on the same tokens."""
    params = case.params(None)
    read = None if case.method.needs_with(params).own_prompt else case.read
    free = case.run(None, forced=tuple(case.full.ids), read=read, params=params)
    if case.method.exact_without_budget:
        return truths.same_logits(case.full.logits, free.logits)
    return truths.finite_logits(free.logits)


def _floor(case: Case) -> Mismatch | None:
    """Ask for a budget that no method can keep, then for the smallest one that the refusal names, then for a byte
    less."""
    try:
        case.run(Budget.parse("2tok"), steps=1)
        return Mismatch("a refusal of a budget of 2 tokens", "a run")
    except BudgetInfeasible as refused:
        smallest = refused.smallest
    try:
        peak = case.run(Budget.parse(f"{smallest}B")).peak_bytes
    except BudgetInfeasible as refused:
        return Mismatch(f"a run at the smallest budget, {smallest} bytes", f"a refusal that names {refused.smallest}")
    if peak > smallest:
        return Mismatch(f"at most {smallest} bytes", f"{peak} at the peak")
    if not case.method.floor_is_exact:
        return None
    try:
        case.run(Budget.parse(f"{smallest - 1}B"), steps=1)
    except BudgetInfeasible:
        return None
    return Mismatch(f"a refusal of {smallest - 1} bytes, one less than the smallest budget", "a run")
