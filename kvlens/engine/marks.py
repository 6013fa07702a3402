"""Marks of tensors that a hook is handed: they tell which of the tensors the hook changes in place.

A tensor was changed in place if its `_version` grew where torch counts, or if its bits changed where it does not. The
engine runs under `inference_mode`, which saves about a tenth of a step on a CPU and leaves its tensors without a
`_version`. Of such a tensor a copy is kept if it is small, as the tensors of a step are. Of a large one, as a prompt
is, sums of its bits along its last two dimensions are kept: a change that leaves all of them equal is not seen. A
tensor with a `_version` is not read, so writes through `.data` or numpy are not seen in it; a model's parameters are
read all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SMALL = 1 << 18
"""numbers of a tensor that is copied at most"""
BITS = {4: torch.int32, 2: torch.int16, 8: torch.int64}
"""bytes of a number -> the integers of that size"""


@dataclass(frozen=True)
class Mark:
    """A tensor as it was."""

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
    moved within its row changes: int64. The results are made before the first sum: a result made between two sums
    would take a piece of the room that the next sum needs, and the process would grow by the whole prompt."""
    dims = range(max(-2, -bits.dim()), 0)
    shapes = [[size for place, size in enumerate(bits.shape) if place != bits.dim() + dim] for dim in dims]
    sums = tuple(torch.empty(shape, dtype=torch.int64, device=bits.device) for shape in shapes)
    _add_up(bits, sums)
    return sums


def _add_up(bits: torch.Tensor, sums: Sequence[torch.Tensor]) -> None:
    """Write the sums of a tensor, of a part at a time, since torch widens what it adds up."""
    if bits.dim() > 2 and bits.numel() > SMALL:
        for part, *part_sums in zip(bits, *sums, strict=True):
            _add_up(part, part_sums)
        return
    for dim, total in zip(range(-len(sums), 0), sums, strict=True):
        torch.sum(bits, dim, out=total)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers as integers, so that NaN equals itself."""
    tensor = tensor.detach()
    return tensor.view(BITS[tensor.element_size()]) if tensor.dtype.is_floating_point else tensor
