"""Triton's interpreter, made faster: the same operations on the same numbers. It puts its own functions in the place of
the language's at each launch and each call of a helper, and builds types, shapes and tables anew for every operation;
here what does not change is looked up once."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


class Found:
    """inspect.getmembers for the interpreter: those names of a module or class of the language that it replaces, looked
    for once. What they stand for is read each time."""

    def __init__(self) -> None:
        self._names: dict[Any, list[str]] = {}

    def __call__(self, package: Any) -> list[tuple[str, Any]]:
        from triton.language.core import is_builtin

        if package not in self._names:
            self._names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        return [(name, getattr(package, name)) for name in self._names[package]]


def numpy_types(known: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """known(type of the language) -> NumPy's, asked once per type."""
    found: dict[Any, Any] = {}

    def of(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = known(kind)
        return found[kind.name]

    return of


def blocks(build: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """block_type.__init__: the attributes of a shape and element that there has been are those of then."""
    found: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key not in found:
            build(self, element, shape)
            found[key] = dict(vars(self))
        else:
            vars(self).update(found[key])

    return init


def tensors(build: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """tensor.__init__: all but the numbers follows from the type."""
    found: dict[Any, dict[str, Any]] = {}

    def init(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in found:
            build(self, handle, kind)
            found[kind.name] = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(found[kind.name])
            self.handle = handle

    return init


def unless_overflown(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> None:
    """The interpreter's own check of whole numbers of up to 32 bits, on the numbers: it fails where the language's
    does."""
    kind = left.type.scalar
    if kind.int_bitwidth >= 64:
        return
    a, b = (side.handle.data.astype(np.int64) for side in (left, right))
    made = _OPERATIONS[operation.__name__](a, b)
    inside = kind.get_int_min_value() <= made.min(initial=0) and made.max(initial=0) <= kind.get_int_max_value()
    assert inside, f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"


def quick_interpreter() -> None:
    """Kernels are interpreted as before, and launched faster."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": Found()})
    interpreter._get_np_dtype = numpy_types(interpreter._get_np_dtype)
    core.block_type.__init__ = blocks(core.block_type.__init__)  # type: ignore[method-assign]
    core.tensor.__init__ = tensors(core.tensor.__init__)  # type: ignore[method-assign]
    TritonSemantic.binary_op_sanitize_overflow_impl = unless_overflown  # type: ignore[method-assign]
