"""What a method asks the engine to keep or compute for it, declared once on its class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """The extra inputs of a method. Every field is off by default, since each costs time or memory."""

    queries: int = 0
    """number of last prompt queries in `Prefilled.last_queries`"""
    peek: bool = False
    """the last prompt token's query, key and value under full attention, in `Prefilled.peeked`; step 0 feeds that
    token"""
    received: bool = False
    """the attention that every prompt token received, in `Prefilled.received`"""
    inputs: bool = False
    """the input and the module of each layer's attention, in `Prefilled.inputs`; the run then reads its own prompt"""
    surprisal: bool = False
    """every prompt token's surprisal, in `Prefilled.surprisal`; without this need a recorded run computes the
    surprisals after its last step, and an unrecorded run never does"""
    weights: bool = False
    """the attention weights of every step, passed to the hook `attended`"""
    reading: bool = False
    """the prompt is read under the attention that the hook `reading` defines; the run then reads its own prompt"""
    ahead: bool = False
    """for every layer but the first, `select` is called while the previous layer runs, with a query estimated from that
    layer's input (kvlens/engine/ahead.py); the memory moves the requested spans meanwhile"""

    @property
    def own_prompt(self) -> bool:
        """True if a prompt that another run has read cannot serve."""
        return self.inputs or self.reading
