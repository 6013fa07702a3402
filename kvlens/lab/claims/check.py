"""The papers' qualitative claims, checked on a model at hand: comparisons of arms (`statements` of a method's class,
STATEMENTS of its part `claims`), and claims that no arm can state, which the part measures (`claims(engine, prompts,
report)`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvlens import methods
from kvlens.lab.claims import Claim
from kvlens.lab.claims.arm_evidence import judge
from kvlens.lab.claims.armstudy import Rows, list_arms
from kvlens.lab.claims.family import decide
from kvlens.lab.claims.plan import Plan, plan
from kvlens.methods import parts
from kvlens.methods.base import Method
from kvlens.methods.statements import Statement, list_statements
from kvlens.models.find import DEMO
from kvlens.refusal import Refusal

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine

OF_METHODS = "kvlens.lab.claims.methods"
"""the package of the methods' own parts (kvlens.methods.parts)"""


def statements_of(method: type[Method]) -> tuple[Statement, ...]:
    """Return the statements of the method's own paper."""
    return getattr(parts.part(method, "claims", OF_METHODS), "STATEMENTS", ()) or list_statements(method)


def claiming(model: str) -> list[str]:
    """The methods whose claims can be checked on a model: the toy reads no prose, which statements are tried on."""
    return [
        name
        for name, method in methods.registry().items()
        if (model != DEMO and statements_of(method)) or _find_claims(method) is not None
    ]


def _find_claims(method: type[Method]) -> Callable[..., list[Claim]] | None:
    """Return the function that measures the method's other claims; None if it has none."""
    return getattr(parts.part(method, "claims", OF_METHODS), "claims", None)


def refuse_others(names: Sequence[str], model: str) -> None:
    """Raises ValueError, one sentence, for a method whose claims cannot be checked on the model."""
    for name in names:
        method = methods.get(name)
        if name not in claiming(model):
            if statements_of(method):
                raise Refusal(
                    f"the claims of '{name}' are tried on prose, which the toy {DEMO} does not read: "
                    "name another --model.",
                    code="model_is_toy",
                    method=name,
                )
            raise Refusal(
                f"'{name}' has no claims; these have: {', '.join(claiming(model))}.", code="no_claims", method=name
            )


def planned(
    names: Sequence[str], model: str, prompts: int | None = None, passages: int | None = None
) -> dict[str, list[Plan]]:
    """Return the plan of each method's statements, by method. prompts, passages: as `kvlens.lab.claims.plan.plan`.

    Raises ValueError as `refuse_others`."""
    refuse_others(names, model)
    statements = {name: statements_of(methods.get(name)) if model != DEMO else () for name in names}
    return {name: plan(rows, len(rows), prompts, passages) for name, rows in statements.items()}


def check(
    model: str,
    plans: Mapping[str, Sequence[Plan]],
    trials: Rows,
    engine: Callable[[], Engine],
    prompts: int,
    report: Callable[[str], None],
) -> Iterator[tuple[str, list[Claim]]]:
    """Yield the claims of each method of the plans whose trials are all there.

    trials: of the statements' arms; engine: loads the model, for claims that no arms state; prompts: of each task, for
    those claims."""
    titles = {name: method.title for name, method in methods.registry().items()}
    for name, rows in plans.items():
        lacking = sum(
            (arm, place) not in trials
            for place, arms in list_arms((row.statement, row.prompts) for row in rows).items()
            for arm in arms
        )
        if lacking:
            report(f"{titles[name]}: {lacking:,} trials have not ended. Run the command again to continue.")
            continue
        measured = _find_claims(methods.get(name))
        more = [] if measured is None else measured(engine(), prompts, report)
        count = len(rows) + sum(claim.test is not None for claim in more)
        compared = [judge(row.statement, name, trials, row.prompts, titles, model, count) for row in rows]
        yield name, decide([*more, *compared])
