"""The tensors that a method holds beside its answers, and those that its hooks are handed, with marks of them.

The tensors that a method holds are found by walking its attributes, whatever `held` announces. A storage counts once
and whole. The walk follows containers, objects, closures, partial and bound functions, and of a plugin the attributes
of its classes and the containers in global variables of its module. It follows no other modules and classes.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvlens.methods.run_inputs import Prefilled

PLAIN = (str, bytes, int, float, complex, bool, type(None), range, slice, torch.dtype, torch.device, torch.Size)
"""types that hold no tensor"""
CLOSED = (type, types.ModuleType, torch.Generator)
"""types whose attributes are not the method's"""
COUNTER_BYTES = 32
"""a storage of at most so many bytes, or of a byte for each KV head of each layer, is a counter or a table of flags,
which no method has to announce"""
GLOBAL = (torch.Tensor, np.ndarray, list, dict, set, tuple, deque)
"""types of global variables that are walked"""
PRODUCT = ("kvlens.methods", "kvlens.lab.gpu", "builtins", "abc", "typing", "torch")
"""beginnings of modules whose classes hold nothing for a run"""
UNANNOUNCED = "unannounced"
"""the name of bytes that a method holds and does not announce"""
SMALL = 1 << 18
"""numbers of a tensor that is copied at most"""
BITS = {4: torch.int32, 2: torch.int16, 8: torch.int64}
"""bytes of a number -> the integers of that size"""


class Holdings:
    """What one run's method holds beside what it announces."""

    def __init__(self, method: Any, device: torch.device) -> None:
        self._method, self._device = method, device
        self._foreign: dict[int, int] | None = None
        """storages of the model and of its calibration; None: not collected yet"""
        self.bytes = 0
        """the most that the method has held unannounced"""

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note of tensors that belong to the model, which a hook is handed."""
        self._foreign_bytes().update(storages_of(tensors))

    def unannounced(self, announced: Iterable[torch.Tensor], memory: Iterable[int]) -> dict[int, int]:
        """Return the bytes of each storage that the method holds, without those that it announces, those of the model
        and those at the addresses `memory`, which the run holds anyway."""
        method = self._method
        context = method.context
        not_its_own = [context, method._journal, context.rotate]  # the model's table of angles grows with positions
        held = held_storages(method, not_its_own, self._device)
        calibration = held_storages(context.calibration, [], self._device)  # modules are moved where they are
        counted = {*storages_of(announced), *self._foreign_bytes(), *memory, *calibration}
        shape = method.context.shape
        least = max(COUNTER_BYTES, shape.layers * shape.kv_heads)
        hidden = {address: size for address, size in held.items() if size > least and address not in counted}
        hidden = self._without_moved(hidden)
        self.bytes = max(self.bytes, sum(hidden.values()))
        return hidden

    def _without_moved(self, hidden: dict[int, int]) -> dict[int, int]:
        """Leave out copies of the calibration that the method moved to the run's device, known by their sizes."""
        host = torch.device("cpu")
        if not hidden or self._device.type == host.type:
            return hidden
        moved = Counter(held_storages(self._method.context.calibration, [], host).values())
        kept_out = set()
        for address, size in hidden.items():
            if moved[size] > 0:
                moved[size] -= 1
                kept_out.add(address)
        return {address: size for address, size in hidden.items() if address not in kept_out}

    def _foreign_bytes(self) -> dict[int, int]:
        if self._foreign is None:
            self._foreign = held_storages(self._method.context, [], self._device)
        return self._foreign


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage by its address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def held_storages(method: Any, skipped: Iterable[object], device: torch.device) -> dict[int, int]:
    """Return the bytes of each storage on `device` that a method holds, by its address. Arrays of numpy count where
    `device` is the host. skipped: objects that are not the method's, such as the run's context."""
    sizes: dict[int, int] = {}
    visited = {id(part) for part in skipped}
    waiting: list[Any] = [method, *_class_values(type(method))]
    while waiting:
        part = waiting.pop()
        if isinstance(part, PLAIN) or id(part) in visited:
            continue
        visited.add(id(part))
        if isinstance(part, torch.Tensor):
            if part.device.type == device.type and part.device.type != "meta":
                sizes |= storages_of([part])
        elif isinstance(part, np.ndarray):
            while isinstance(part.base, np.ndarray):
                part = part.base
            if device.type == "cpu" and part.base is None:
                sizes[part.ctypes.data] = part.nbytes
            waiting.append(part.base)
        elif not isinstance(part, CLOSED):
            waiting.extend(_parts(part))
    sizes.pop(0, None)  # an empty storage has no address
    return sizes


def _parts(whole: Any) -> Iterator[Any]:
    """The values inside a container, function or object."""
    if isinstance(whole, Mapping):
        yield from whole.keys()
        yield from whole.values()
    elif isinstance(whole, list | tuple | set | frozenset | deque):
        yield from whole
    elif isinstance(whole, types.FunctionType):
        yield from whole.__defaults__ or ()
        for cell in whole.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
    elif isinstance(whole, types.MethodType):
        yield whole.__self__
        yield whole.__func__
    elif isinstance(whole, functools.partial):
        yield from (whole.func, whole.args, whole.keywords)
    yield from getattr(whole, "__dict__", {}).values()
    for kind in type(whole).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(whole, name):
                yield getattr(whole, name)


def _class_values(kind: type) -> Iterator[Any]:
    """Values of a method's own classes, and tensors and containers in global variables of their modules: there a plugin
    may store tensors for all its runs."""
    for base in kind.__mro__:
        if base.__module__.startswith(PRODUCT):
            continue
        yield from vars(base).values()
        module = sys.modules.get(base.__module__)
        names = vars(module).items() if module is not None else ()
        yield from [value for name, value in names if isinstance(value, GLOBAL) and not name.startswith("__")]


Handed = Sequence[tuple[str, torch.Tensor | None]]
"""the tensors that a hook is handed, by name"""


def tensors_of(prompt: Prefilled) -> Handed:
    """The tensors of a prompt, by the names that a sentence uses."""
    named = [
        ("keys", prompt.keys),
        ("values", prompt.values),
        ("queries", prompt.last_queries),
        ("surprisals", prompt.surprisal),
        ("received attention", prompt.received),
        *(("second reading", tensor) for tensor in (prompt.repeated, prompt.repeated_queries)),
    ]
    if prompt.peeked is not None:
        named += [(f"peeked {name}", tensor) for name, tensor in vars(prompt.peeked).items()]
    if prompt.inputs is not None:
        named.append(("inputs", prompt.inputs.hidden))
    return named


@dataclass(frozen=True)
class Mark:
    """A tensor as it was: a hook that changes it in place changes its `_version` where torch counts, else its bits. The
    engine runs under `inference_mode`, which saves about a tenth of a step on a CPU and leaves its tensors without
    a `_version`. Of such a tensor a copy is kept if it is small, as the tensors of a step are. Of a large one, as a
    prompt is, sums of its bits along its last two dimensions are kept: a change that leaves all of them equal is not
    seen. A tensor with a `_version` is not read, so writes through `.data` or numpy are not seen in it; a model's
    parameters are read all the same.
    """

    tensor: torch.Tensor
    place: tuple[object, ...]
    """storage, shape and strides, which `set_` and `resize_` change"""
    version: int | None
    bits: tuple[torch.Tensor, ...]
    """the bits, or their sums"""

    @classmethod
    def take(cls, tensor: torch.Tensor) -> Mark:
        """Mark a tensor before a hook sees it."""
        if not tensor.is_inference() and not isinstance(tensor, torch.nn.Parameter):
            return cls(tensor, _place(tensor), tensor._version, ())
        bits = _bits(tensor)
        return cls(tensor, _place(tensor), None, (bits.clone(),) if bits.numel() <= SMALL else _sums(bits))

    def changed(self) -> bool | torch.Tensor:
        """Return whether the tensor differs now; on a device a 0-d flag that no one has read."""
        if _place(self.tensor) != self.place:
            return True
        if self.version is not None:
            return bool(self.tensor._version != self.version)
        bits = _bits(self.tensor)
        pairs = list(zip((bits,) if bits.numel() <= SMALL else _sums(bits), self.bits, strict=True))
        if bits.device.type == "cpu":
            return not all(torch.equal(now, former) for now, former in pairs)
        return torch.stack([(now != former).any() for now, former in pairs]).any()


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor lies."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _sums(bits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return sums along the last dimension, which a moved row changes, and along the one before it, which a number
    moved within its row changes: int64. A part at a time is widened and added up, all in one room: what torch takes
    and frees for each sum would make the process grow."""
    dims, part = range(max(-2, -bits.dim()), 0), bits
    while part.dim() > 2 and part.numel() > SMALL:
        part = part[0]
    sums = tuple(torch.empty(bits.select(dim, 0).shape, dtype=torch.int64, device=bits.device) for dim in dims)
    wide = torch.empty_like(part, dtype=torch.int64)
    for place in np.ndindex(*bits.shape[: bits.dim() - part.dim()]):
        wide.copy_(bits[place])
        for dim, total in zip(dims, sums, strict=True):
            torch.sum(wide, dim, out=total[place])
    return sums


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers as integers, so that NaN equals itself."""
    tensor = tensor.detach()
    return tensor.view(BITS[tensor.element_size()]) if tensor.dtype.is_floating_point else tensor
