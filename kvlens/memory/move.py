"""One copy between the tiers, and how it is made of copies of contiguous memory, which is all that a DMA engine is
asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Move:
    """Copy `source` to `target`, or into its rows `index` along the last but one dimension. `slots`: the same rows as
    the host knows them, for a link whose copies cannot read a tensor."""

    target: torch.Tensor
    source: torch.Tensor
    index: torch.Tensor | None = None
    slots: Sequence[int] = ()

    def run(self) -> None:
        if self.index is None:
            self.target.copy_(self.source)
        else:
            self.target.index_copy_(-2, self.index, self.source)

    def pieces(self, arrange: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same copy as contiguous pieces (target, source): consecutive slots are one piece. Raises RuntimeError
        where the shapes do not fit, before anything is copied.

        arrange: a target that is one stretch of memory is one piece, in the order in which it lies, though its source
        lies in another: who copies has to put the source in order first, on the source's own side.
        """
        if self.index is None:
            target, source = self.target, self.source
            order = sorted(range(target.dim()), key=target.stride, reverse=True)
            if arrange and target.shape == source.shape and target.permute(order).is_contiguous():
                return iter(((target.permute(order), source.permute(order)),))
            return _contiguous(target, source)
        rows, wanted = self.source.shape[-2], (*self.target.shape[:-2], len(self.slots), self.target.shape[-1])
        if self.source.shape != wanted:
            raise RuntimeError(
                f"a copy of {tuple(self.source.shape)} cannot go into {rows} rows of {tuple(self.target.shape)}"
            )
        return (
            piece
            for first, at, count in _runs(self.slots)
            for piece in _contiguous(self.target.narrow(-2, at, count), self.source.narrow(-2, first, count))
        )

    @property
    def bytes(self) -> int:
        return self.source.numel() * self.source.element_size()


def _contiguous(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if target.shape != source.shape:
        raise RuntimeError(f"a copy of {tuple(source.shape)} cannot go into {tuple(target.shape)}")
    if source.dim() == 0 or (target.is_contiguous() and source.is_contiguous()):
        return iter(((target, source),))
    return (piece for pair in zip(target, source, strict=True) for piece in _contiguous(*pair))


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Consecutive slots together: (place of the first one in `slots`, its number, how many)."""
    first = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1:
            yield first, slots[first], i - first
            first = i


def joined(moves: Sequence[Move]) -> Sequence[Move]:
    """Whole moves of one shape whose targets lie at equal distances in one storage, and whose sources do, as one move
    with one dimension more in front; others as they are."""
    target, source = _even([move.target for move in moves]), _even([move.source for move in moves])
    return (
        [Move(target, source)]
        if target is not None and source is not None and all(move.index is None for move in moves)
        else moves
    )


def _even(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    first = parts[0]
    start, kind = first.storage_offset(), (first.dtype, first.shape, first.stride(), first.untyped_storage().data_ptr())
    step = parts[1].storage_offset() - start if len(parts) > 1 else 0
    for i, part in enumerate(parts):
        if (
            part.dtype,
            part.shape,
            part.stride(),
            part.untyped_storage().data_ptr(),
        ) != kind or part.storage_offset() != start + i * step:
            return None
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()), start) if step >= 0 else None
