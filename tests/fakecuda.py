"""Tensors that say they lie on a CUDA device, and lie on the CPU: what PyTorch would refuse on a GPU, because tensors
of two devices meet or because one is taken for host memory, is refused here too. Kernels of kvlens may read host memory
where it is registered. Inside `capturing`, so is what a stream refuses while it is captured: waiting for it, and copies
from memory that may be paged out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda")
COPIES = {torch.Tensor.copy_}
INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
TO_HOST = {
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}
WAITS = {
    "cpu",
    "numpy",
    "__array__",
    "nonzero",
    "argwhere",
    "unique",
    "unique_consecutive",
    "masked_select",
    "equal",
    "allclose",
}
"""functions whose result the host has to see"""
DRAWS = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal_", "uniform_", "exponential_"}
FROM_HOST = {"tensor", "as_tensor", "from_numpy", "to", "cuda", "copy_", "new_tensor"}
NESTED = (tuple, list, dict)
PLAIN = (bool, int, float, torch.Size, torch.dtype, type(None))
"""results without a tensor in them"""
_registered: list[Mapping[int, int]] = [{}]
"""host memory that kernels may read: size of each range by its address"""
_captured: list[list[tuple[Any, ...]]] = []


@contextmanager
def registered(ranges: Mapping[int, int]) -> Iterator[None]:
    """Inside, kernels may read this host memory."""
    _registered.append(ranges)
    try:
        yield
    finally:
        _registered.pop()


@contextmanager
def capturing() -> Iterator[list[tuple[Any, ...]]]:
    """Inside, the device's work is captured: the calls, with the shapes they are given."""
    _captured.append([])
    try:
        yield _captured[-1]
    finally:
        _captured.pop()


class OnCuda(torch.Tensor):
    """A CPU tensor that claims the device."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


class FakeCuda(TorchFunctionMode):
    """Inside, tensors made on `cuda` are OnCuda."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


def on_cuda(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(OnCuda)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind it, as what it is."""
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(torch.Tensor) if isinstance(tensor, OnCuda) else tensor


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Those in tuples, lists and dicts, as a function's arguments come: a step asks for them ten thousand times."""
    for leaf in tree.values() if type(tree) is dict else tree:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif type(leaf) in NESTED:
            yield from tensors(leaf)


def call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Refuse what a GPU would refuse, do the rest on the CPU, and let the result claim the device that it would
    have."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__" and isinstance(args[0], OnCuda):
        return _attribute(func, args[0])
    given = list(tensors((args, kwargs)))
    there = [t for t in given if isinstance(t, OnCuda)]
    target = _device(func, args, kwargs)
    with torch._C.DisableTorchFunction():
        here = [t for t in given if not isinstance(t, OnCuda) and t.dim() > 0]
    if getattr(func, "namespace", None) == "kvlens":
        _refuse_pageable(here)
    elif there and here and func not in COPIES:
        _refuse_mixture(func, name, args)
    if _captured and name != "__get__" and (there or (target is not None and target.type == "cuda")):
        _refuse_in_capture(func, name, args, kwargs)
        with torch._C.DisableTorchFunction():
            _captured[-1].append((name, *(tuple(t.shape) for t in given)))
    if there and name in ("numpy", "__array__") and not kwargs.get("force"):
        raise TypeError("can't convert cuda device type tensor to numpy.")
    moved_args, moved = _plain(args), _plain(kwargs)
    with torch._C.DisableTorchFunction():
        out = func(*moved_args, **moved)
    if target is not None:
        claims = target.type == "cuda"
    elif name in ("cpu", "numpy"):
        claims = False
    elif func in COPIES or (args and name.endswith("_") and not name.endswith("__")):
        claims = isinstance(args[0], OnCuda)
    else:
        claims = bool(there) and func not in TO_HOST
    return _claiming(out) if claims else out


def _attribute(func: Callable[..., Any], tensor: OnCuda) -> Any:
    owner = getattr(func, "__self__", None)
    if owner is torch.Tensor.device:
        return CUDA
    if owner is torch.Tensor.is_cuda:
        return True
    with torch._C.DisableTorchFunction():
        return _claiming(func(on_host(tensor)))


def _claiming(out: Any) -> Any:
    """What was computed, said to lie on the device."""
    if isinstance(out, PLAIN):
        return out
    return tree_map(lambda x: on_cuda(x) if type(x) in (torch.Tensor, torch.nn.Parameter) else x, out)


def _plain(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return on_host(tree)
    if type(tree) is dict:
        return {name: _plain(value) for name, value in tree.items()}
    if type(tree) in NESTED:
        return type(tree)(map(_plain, tree))
    return torch.device("cpu") if isinstance(tree, torch.device) and tree.type == "cuda" else tree


def _device(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """The device that is asked for by name."""
    found = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
    if func is torch.Tensor.to or not found:
        found += [
            torch.device(x)
            for x in (*args[1:2], kwargs.get("device"))
            if isinstance(x, str) and x.startswith(("cuda", "cpu"))
        ]
    return found[0] if found else None


def _refuse_mixture(func: Callable[..., Any], name: str, args: Any) -> None:
    if func in INDEXED and isinstance(args[0], OnCuda):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        by_tensor = any(isinstance(i, torch.Tensor | list) for i in index)
        if (
            name == "__getitem__"
            or not by_tensor
            or isinstance(args[2], OnCuda)
            or not isinstance(args[2], torch.Tensor)
        ):
            return  # indices may lie on the host, and slices may be set from there
    raise RuntimeError(
        f"{name}: expected all tensors to be on the same device, but found at least two devices, cuda and cpu!"
    )


def _refuse_pageable(given: list[torch.Tensor]) -> None:
    """What Triton refuses of its launchers' arguments."""
    for tensor in given:
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if not any(start <= first and end <= start + size for start, size in _registered[-1].items()):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")


def _refuse_in_capture(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> None:
    given = list(tensors((args, kwargs)))
    index = () if func not in INDEXED else args[1] if isinstance(args[1], tuple) else (args[1],)
    waits = func in TO_HOST or name in WAITS or (name == "where" and len(args) + len(kwargs) == 1)
    waits |= any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in index)
    copies = name in FROM_HOST and not (given and all(isinstance(t, OnCuda) for t in given))
    copies |= any(isinstance(i, list) or (isinstance(i, torch.Tensor) and not isinstance(i, OnCuda)) for i in index)
    if waits or copies or name in DRAWS:
        raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
