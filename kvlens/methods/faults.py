"""The error of a method that breaks the contract of a hook."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from kvlens.hangs import VARIABLE, Hang, Watch, giving_up, in_words, interruptible, limit

OUTPUT = "hook_output"
"""a hook returned a wrong shape, type, range or number"""
CHANGED = "hook_changed_input"
"""a hook changed a tensor that it was handed"""
RAISED = "hook_raised"
"""a hook raised an exception that is no refusal"""
BUDGET = "hook_budget"
"""a hook took more device bytes than the budget"""
HANGS = "hook_hangs"
"""a hook did not end within its time"""
FIGURE = "figure_out_of_range"
"""a recorded figure lies outside its range"""


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
    """Return a MethodFault for an exception that is no Exception and that a method raises outside its hooks, in its
    arithmetic say, and `error` itself otherwise; a KeyboardInterrupt is `error` itself."""
    if isinstance(error, Exception | KeyboardInterrupt):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    place = frames[-1].name if frames else "module"
    if isinstance(error, Hang):
        return hangs(method, place)
    return MethodFault(RAISED, method, place, f"raised {type(error).__name__}")


def hangs(method: str, hook: str, layer: int | None = None, step: int | None = None) -> MethodFault:
    """Return the error of a hook that does not end."""
    problem = f"does not end within {in_words(limit())} ({VARIABLE} sets the limit)"
    return MethodFault(HANGS, method, hook, problem, layer=layer, step=step)


@contextmanager
def limited(method: str, hook: str) -> Iterator[None]:
    """Limit the time of a block that calls a method outside the engine. Raises MethodFault with the code HANGS."""
    watch = Watch(limit(), method, give_up=giving_up())
    try:
        with interruptible():
            watch.begin(hook)
            try:
                yield
            finally:
                watch.end()
    except Hang as error:
        raise hangs(method, hook) from error
