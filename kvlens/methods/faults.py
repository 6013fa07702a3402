"""The error of a method that breaks the contract of a hook."""

from __future__ import annotations

import traceback

OUTPUT = "hook_output"
"""a hook returned a wrong shape, type, range or number"""
CHANGED = "hook_changed_input"
"""a hook changed a tensor that it was handed"""
RAISED = "hook_raised"
"""a hook raised an exception that is no refusal"""
BUDGET = "hook_budget"
"""a hook took more device bytes than the budget"""


class MethodFault(ValueError):
    """One sentence that names the method and the hook, with a code and the values behind the sentence."""

    def __init__(
        self,
        code: str,
        method: str,
        hook: str,
        problem: str,
        expected: str = "",
        actual: str = "",
        layer: int | None = None,
        step: int | None = None,
    ) -> None:
        """code: one of the constants above. problem: a clause with the hook as its subject. step: None before
        decoding."""
        self.code, self.method, self.hook, self.problem = code, method, hook, problem
        self.expected, self.actual, self.layer, self.step = expected, actual, layer, step
        super().__init__(code, method, hook, problem)

    def __str__(self) -> str:
        values = f" (expected {self.expected}, got {self.actual})" if self.expected else ""
        known = ((name, getattr(self, name)) for name in ("step", "layer"))
        place = ", ".join(f"{name} {number}" for name, number in known if number is not None)
        return f"{self.code}: {self.method}.{self.hook} {self.problem}{values}{f' at {place}' if place else ''}."


def stray(method: str, error: BaseException) -> BaseException:
    """Return a MethodFault for a SystemExit or GeneratorExit that a method raises outside its hooks, in its arithmetic
    say, and `error` itself otherwise."""
    if not isinstance(error, SystemExit | GeneratorExit):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    return MethodFault(RAISED, method, frames[-1].name if frames else "module", f"raised {type(error).__name__}")
