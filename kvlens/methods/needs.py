"""What a method asks the engine to keep or compute for it, declared once on its class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SecondReading:
    """The prompt goes through the model once more, chunk by chunk over its full cache, each chunk behind an instruction
    to repeat it."""

    opening: str
    """the instruction before the first chunk"""
    following: str
    """the instruction before a later one, which the end of the chunk before it completes"""
    chunk: int
    """tokens of a chunk"""
    lead: int
    """tokens of the chunk before that complete the instruction"""
    sinks: int = 0
    """first tokens of the prompt that take part in the softmax beside the chunk and what repeats it"""
    queries: int = 0
    """queries of the repeated tokens in `Prefilled.repeated_queries`, evenly over the prompt"""


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
    second: SecondReading | None = None
    """the most attention that every prompt token receives while the prompt is repeated, in `Prefilled.repeated`"""

    @property
    def own_prompt(self) -> bool:
        """True if a prompt that another run has read cannot serve."""
        return self.inputs or self.reading
