"""The papers' qualitative claims, checked on a model at hand: those that are comparisons of arms, which a method's
class states (`statements`), and those that need more, which its part `claims` measures (`claims(engine, prompts,
report)`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens import methods
from kvlens.lab.claims import Claim
from kvlens.lab.claims.arms import measure, wanted
from kvlens.lab.claims.judged import judge
from kvlens.methods import parts
from kvlens.methods.statements import stated
from kvlens.models.find import DEMO

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine

OF_METHODS = "kvlens.lab.claims.methods"
"""the package of the methods' own parts (kvlens.methods.parts)"""


def claiming(model: str) -> list[str]:
    """The methods whose claims can be checked on a model: the toy reads no prose, which statements are tried on."""
    return [
        name
        for name, method in methods.registry().items()
        if parts.has(method, "claims", OF_METHODS) or (stated(method) and model != DEMO)
    ]


def refuse_others(names: Sequence[str], model: str) -> None:
    """Raises ValueError, one sentence, for a method whose claims cannot be checked on the model."""
    for name in names:
        method = methods.get(name)
        if name not in claiming(model):
            known = ", ".join(claiming(model))
            toy = f"are tried on prose, which the toy {DEMO} does not read: name another --model" * bool(stated(method))
            raise ValueError(
                f"the claims of '{name}' {toy}." if toy else f"'{name}' has no claims; these have: {known}."
            )


def check(
    engine: Engine, names: Sequence[str], prompts: int, report: Callable[[str], None], file: Path
) -> Iterator[tuple[str, list[Claim]]]:
    """The claims of the named methods, method by method, `prompts` prompts per point. file: keeps the trials of
    statements, so that they are not run again. Raises ValueError as `refuse_others`, and for a file of something
    else."""
    model = engine.loaded.name
    refuse_others(names, model)
    statements = {name: stated(methods.get(name)) if model != DEMO else () for name in names}
    rows = measure(wanted((one for of in statements.values() for one in of), prompts), file, engine, report)
    titles = {name: method.title for name, method in methods.registry().items()}
    for name in names:
        module = parts.part(methods.get(name), "claims", OF_METHODS)
        more = [] if module is None else module.claims(engine, prompts, report)
        yield name, [*more, *(judge(one, name, rows, prompts, titles, model) for one in statements[name])]
