"""Segmenters: pure functions from token positions (and surprisals) to a partition into spans."""

from kvlens.spans.entropy import entropy_feasible, entropy_paper
from kvlens.spans.span import Span, Surprisal, check_partition, fixed_chunks

__all__ = ["Span", "Surprisal", "check_partition", "entropy_feasible", "entropy_paper", "fixed_chunks"]
