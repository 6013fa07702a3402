"""Tensors that say they lie on a CUDA device, and lie on the CPU: what PyTorch would refuse on a GPU, because tensors of two devices
meet or because one is taken for host memory, is refused here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda")
COPIES = {torch.Tensor.copy_}
INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
TO_HOST = {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__,
           torch.Tensor.__index__}  # fmt: skip


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
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor))


def call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Refuse what a GPU would refuse, do the rest on the CPU, and let the result claim the device that it would have."""
    name = getattr(func, "__name__", str(func))
    there = [t for t in tensors((args, kwargs)) if isinstance(t, OnCuda)]
    if name == "__get__" and there:
        owner = getattr(func, "__self__", None)
        if owner is torch.Tensor.device:
            return CUDA
        if owner is torch.Tensor.is_cuda:
            return True
    target = _device(func, args, kwargs)
    with torch._C.DisableTorchFunction():
        here = [t for t in tensors((args, kwargs)) if not isinstance(t, OnCuda) and t.dim() > 0]
    if there and here and func not in COPIES:
        _refuse_mixture(func, name, args)
    if there and name in ("numpy", "__array__") and not kwargs.get("force"):
        raise TypeError("can't convert cuda device type tensor to numpy.")
    moved_args, moved = tree_map(_plain, (args, kwargs))
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
    return tree_map(lambda x: on_cuda(x) if isinstance(x, torch.Tensor) and type(x) is torch.Tensor else x, out) if claims else out


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return on_host(leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf


def _device(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """The device that is asked for by name."""
    found = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
    if func is torch.Tensor.to or not found:
        found += [torch.device(x) for x in (*args[1:2], kwargs.get("device")) if isinstance(x, str) and x.startswith(("cuda", "cpu"))]
    return found[0] if found else None


def _refuse_mixture(func: Callable[..., Any], name: str, args: Any) -> None:
    if func in INDEXED and isinstance(args[0], OnCuda):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        by_tensor = any(isinstance(i, torch.Tensor | list) for i in index)
        if name == "__getitem__" or not by_tensor or isinstance(args[2], OnCuda) or not isinstance(args[2], torch.Tensor):
            return  # indices may lie on the host, and slices may be set from there
    raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found at least two devices, cuda and cpu!")
