"""The contract of a method's hooks: the error of a method that breaks it, and the checks of what the hooks return, made
once, where the caller of the hook takes the result.

The engine's border (kvlens/engine/border.py) checks the nine hooks; a family checks the hooks of its own, such as
`score`. Shapes and types are checked at once. Numbers are checked at once on the host, and on a device together, once
per step: `settle` reads one flag, when the host has waited for the step anyway. A step that is compiled or captured
checks no numbers.
"""

from __future__ import annotations

import dis
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvlens.hangs import VARIABLE, Hang, Watch, giving_up, limit
from kvlens.interrupts import interruptible
from kvlens.text.units import time_limit

if TYPE_CHECKING:
    import torch


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


def is_refusal(error: BaseException, method: type) -> bool:
    """Return True for a ValueError that a `raise` of kvlens or of a package of the method's classes made: a sentence
    for the user. One that a library or a builtin raised, `max` of nothing for one, is a fault."""
    origin = error.__traceback__
    while origin is not None and origin.tb_next is not None:
        origin = origin.tb_next
    if not isinstance(error, ValueError) or origin is None:
        return False
    package = str(origin.tb_frame.f_globals.get("__name__")).partition(".")[0]
    is_raised = origin.tb_frame.f_code.co_code[origin.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    parts = [part for base in method.__mro__ for part in (base, *vars(base).values())]
    packages = {str(getattr(part, "__module__", "")).partition(".")[0] for part in parts}
    return is_raised and package in {"kvlens", "kernels", "store", *packages}


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
        places = ((name, getattr(self, name)) for name in ("step", "layer"))
        place = ", ".join(f"{name} {number}" for name, number in places if number is not None)
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
    problem = f"does not end within {time_limit(limit())} ({VARIABLE} sets the limit)"
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


Size = tuple[int | str, ...]
"""a shape; a name stands for any length"""
NUMBERS = "finite numbers"
SCORES = "numbers or -inf"
SHARE_TOLERANCE = 1e-3
"""error allowed beyond 0..1"""


class HookChecks:
    """The checks of one run's method, and the device's flags that no one has read yet."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.enabled = True
        """False: numbers are not checked, in a step that may not copy to the host (kvlens/lab/gpu/static)"""
        self.step: int | None = None
        """the decode step under way; None before decoding"""
        self._waiting: list[tuple[MethodFault, torch.Tensor]] = []
        """an error, and the 0-d flag on the device that decides whether it is raised"""

    def fault(
        self,
        hook: str,
        problem: str,
        expected: str = "",
        actual: str = "",
        layer: int | None = None,
        code: str = OUTPUT,
    ) -> MethodFault:
        """Return the error to raise."""
        return MethodFault(code, self.method, hook, problem, expected, actual, layer, self.step)

    def tensor(
        self, hook: str, found: Any, sizes: tuple[Size, ...], kinds: str = "float", layer: int | None = None
    ) -> Any:
        """Return `found` if it is a tensor of one of `sizes`. kinds: words of float, int, bool. Raises MethodFault."""
        import torch

        if torch.compiler.is_compiling():
            return found
        if not isinstance(found, torch.Tensor):
            raise self.fault(hook, "returned no tensor", _sizes(sizes), type(found).__name__, layer)
        shape = tuple(found.shape)
        if shape not in sizes and not any(_fits(shape, size) for size in sizes):
            raise self.fault(hook, "returned a wrong shape", _sizes(sizes), str([*shape]), layer)
        kind = "float" if found.dtype.is_floating_point else "bool" if found.dtype == torch.bool else "int"
        if kind not in kinds or found.dtype.is_complex:
            raise self.fault(hook, "returned a wrong type of numbers", kinds, str(found.dtype), layer)
        return found

    def scores(self, hook: str, found: Any, *sizes: Size, layer: int | None = None) -> torch.Tensor:
        """Return `found` if it has one of `sizes` and holds numbers to rank by. Raises as `rankable`."""
        checked: torch.Tensor = self.tensor(hook, found, sizes, "float or int", layer)
        self.rankable(hook, checked, layer)
        return checked

    def rankable(self, hook: str, scores: torch.Tensor, layer: int | None = None) -> None:
        """Refuse NaN and +inf; -inf ranks last. Raises MethodFault, on a device with the next `settle`."""
        if self.enabled and scores.numel():
            self._number(hook, scores.max(), SCORES, layer)

    def finite(self, hook: str, found: Any, *sizes: Size, layer: int | None = None) -> torch.Tensor:
        """Return `found` if it has one of `sizes` and holds finite numbers only. Raises as `rankable`."""
        checked: torch.Tensor = self.tensor(hook, found, sizes, "float or int", layer)
        if self.enabled and checked.numel():
            self._number(hook, checked.abs().max(), NUMBERS, layer)
        return checked

    def share(self, hook: str, table: torch.Tensor, noun: str, layer: int | None = None) -> None:
        """Refuse a number of `table`, not empty, outside 0..1, rounding apart. Raises as `rankable`."""
        import torch

        if not self.enabled or torch.compiler.is_compiling():
            return
        wrong = ((table < -SHARE_TOLERANCE) | (table > 1 + SHARE_TOLERANCE)).any()
        error = self.fault(hook, f"returned a wrong {noun}", "0 to 1", "others", layer)
        self.decide(error, bool(wrong) if wrong.device.type == "cpu" else wrong)

    def within(self, hook: str, table: torch.Tensor, noun: str, least: int, end: int, layer: int | None = None) -> None:
        """Refuse a number of `table`, not empty, below `least` or from `end` on. Raises as `rankable`."""
        import torch

        if not self.enabled or torch.compiler.is_compiling():
            return
        problem, expected = f"returned {noun} out of range", f"{least} to {end - 1}"
        if table.device.type != "cpu":
            wrong = ((table < least) | (table >= end)).any()
            self._waiting.append((self.fault(hook, problem, expected, "others", layer), wrong))
            return
        low, high = (bound.item() for bound in torch.aminmax(table))
        if low < least or high >= end:
            raise self.fault(hook, problem, expected, str(low if low < least else high), layer)

    def _number(self, hook: str, largest: torch.Tensor, expected: str, layer: int | None) -> None:
        """largest: 0-d; NaN if any number is NaN."""
        import torch

        if torch.compiler.is_compiling():
            return
        if largest.device.type != "cpu":
            error = self.fault(hook, "returned wrong numbers", expected, "NaN or inf", layer)
            self._waiting.append((error, ~(largest < math.inf)))
            return
        number = largest.item()
        if not number < math.inf:
            raise self.fault(hook, "returned wrong numbers", expected, "NaN" if number != number else "inf", layer)

    def decide(self, error: MethodFault, wrong: bool | torch.Tensor) -> None:
        """Raise `error` if `wrong`; keep a flag on a device for the next `settle`."""
        if wrong is True:
            raise error
        if wrong is not False:
            self._waiting.append((error, wrong))

    def settle(self) -> None:
        """Read the flags of a step on the device, with one copy to the host. Raises MethodFault for the first one."""
        if not self._waiting:
            return
        import torch

        waiting, self._waiting = self._waiting, []
        for (error, _), wrong in zip(waiting, torch.stack([flag for _, flag in waiting]).tolist(), strict=True):
            if wrong:
                raise error


def _fits(shape: tuple[int, ...], size: Size) -> bool:
    return len(shape) == len(size) and all(
        isinstance(wanted, str) or length == wanted for length, wanted in zip(shape, size, strict=True)
    )


def _sizes(sizes: tuple[Size, ...]) -> str:
    return " or ".join(f"[{', '.join(map(str, size))}]" for size in sizes)
