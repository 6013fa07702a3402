"""The cuts that CHESS offers to the Spans page: its pages, and the two levels above them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from kvlens.methods.chess.params import ChessParameters
from kvlens.methods.segmenter import Segmenter
from kvlens.spans import Span, fixed_chunks


def chunks(params: ChessParameters, pages: Sequence[Span]) -> list[Span]:
    """Chunks of pages."""
    return fixed_chunks(0, _end(pages), params.page * params.chunk_pages)


def grids(params: ChessParameters, pages: Sequence[Span]) -> list[Span]:
    """Grids of chunks."""
    return fixed_chunks(0, _end(pages), params.page * params.chunk_pages * params.grid_chunks, kind="grid")


def _end(pages: Sequence[Span]) -> int:
    return pages[-1].tok_end if pages else 0


SEGMENTERS = (
    Segmenter("pages (CHESS)", ("page", "sink_pages", "window_pages")),
    Segmenter("chunks (CHESS)", ("chunk_pages",), cut=chunks),
    Segmenter("grids (CHESS)", ("grid_chunks",), cut=grids),
)
