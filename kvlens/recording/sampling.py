"""Which steps and layers have full attention by span recorded: what the option says, and what is taken by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from kvlens.refusal import BadValue, Refusal

if TYPE_CHECKING:
    from kvlens.metaparts import Sampled
    from kvlens.shape import KVShape

AUTO_NUMBERS = 8_000_000
"""'auto': weights of full attention that may be grouped per step, on average over the steps without a loss"""
TOGETHER = 8
"""steps measured at a time, so that the second thread takes the interpreter from the engine's less often"""
TOGETHER_NUMBERS = 8_000_000
"""weights of full attention beyond which a step is large: such steps do not wait in a row"""
HELD_NUMBERS, HELD_SHARE = 16_000_000, 16
"""steps that are measured at a time hold at most so many numbers, or one in HELD_SHARE of full KV's if that is more"""
LAYER_NUMBERS = 8_000_000
"""and they have at most so many weights of one layer"""
MOST_LOST = 32
"""'auto': lost steps that are recorded although they are not among the chosen ones"""
_EXAMPLE = "auto, off, all, or like every=4,layers=0-3+7"
_EVERY = re.compile(r"[0-9]{1,6}")
_RANGE = re.compile(r"([0-9]{1,3})(?:-([0-9]{1,3}))?")


@dataclass(frozen=True)
class OracleSampling:
    """Every `every`-th step, beginning with step 0, in `layers` (ascending, without repeats); with `losses` also the
    first MOST_LOST lost steps between them."""

    every: int
    layers: tuple[int, ...]
    losses: bool = False

    def choose_layers(self, step: int, lost: int = 0) -> tuple[int, ...]:
        """Return the layers to record at a step, none between the chosen steps. lost: which lost step between the
        chosen ones it is, from 1 on; 0: nothing was lost at it."""
        return self.layers if step % self.every == 0 or (self.losses and 0 < lost <= MOST_LOST) else ()

    def meta(self) -> Sampled:
        """As the run's meta holds it."""
        from kvlens.metaparts import Sampled  # pydantic, which GPU machines may lack

        return Sampled(every=self.every, layers=self.layers, losses=self.losses)


def check(text: str) -> None:
    """Raise BadValue unless `text` is such an option; layers a model lacks are found by `resolve`."""
    _parse(text)


def resolve(text: str, layers: int, q_heads: int, prompt_tokens: int, coverage: bool = True) -> OracleSampling | None:
    """What `text` means for a model of `layers` x `q_heads` and a prompt; None: nothing is recorded.

    'auto' takes every layer, and every step or so few of them that AUTO_NUMBERS holds; then lost steps come on top, so
    that no loss goes unexplained because its context is long. `coverage`: whether the exact
    keys are kept, without which there is no full attention. Raises ValueError for bad text, a layer the model lacks, or
    a sampling asked for by name without coverage.
    """
    every, layer_choice = _parse(text)
    if text == "off" or (text == "auto" and not coverage):
        return None
    if not coverage:
        raise Refusal(
            f"oracle={text} needs the exact keys of all positions; record coverage as well, or say oracle=off.",
            code="coverage_missing",
        )
    if text == "auto":
        every = max(1, -(-layers * q_heads * prompt_tokens // AUTO_NUMBERS))
    layer_numbers = range(layers) if layer_choice is None else layer_choice
    if layer_numbers[-1] >= layers:
        raise BadValue(
            f"oracle={text} names layer {layer_numbers[-1]}, the model's layers are 0 to {layers - 1}; name others.",
            name="oracle",
            value=text,
        )
    return OracleSampling(every, tuple(layer_numbers), losses=text == "auto" and every > 1)


def words(sampled: Sampled | None, layers: int) -> str:
    """What a run's meta says of it, for people: 'every step and all layers', 'one step in 4 and layers 0, 1', 'one step
    in 4, lost steps and all layers', 'not recorded'."""
    if sampled is None:
        return "not recorded"
    every, layer_choice = sampled.every, sampled.layers
    sample = "all layers" if len(layer_choice) in (0, layers) else f"layers {', '.join(map(str, layer_choice))}"
    steps = "every step" if every == 1 else f"one step in {every}{', lost steps' if sampled.losses else ''}"
    return f"{steps} and {sample}"


def _parse(text: str) -> tuple[int, list[int] | None]:
    """(every, layers), layers None for all."""
    if not isinstance(text, str):
        raise _refused(text)
    if text in ("auto", "off", "all"):
        return 1, None
    every, layers, visited = 1, None, set()
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name in visited or name not in ("every", "layers"):
            raise _refused(text)
        visited.add(name)
        if name == "every":
            if not _EVERY.fullmatch(value) or int(value) == 0:
                raise _refused(text)
            every = int(value)
        else:
            layers = _layers(text, value)
    return every, layers


def _layers(text: str, value: str) -> list[int]:
    numbers: set[int] = set()
    for part in value.split("+"):
        match = _RANGE.fullmatch(part)
        start, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if start > last:
            raise _refused(text)
        numbers.update(range(start, last + 1))
    return sorted(numbers)


def _refused(text: object) -> BadValue:
    sentence = f"{str(text)[:80]!r} does not say which full attention to record; say {_EXAMPLE}."
    return BadValue(sentence, name="oracle", value=text)


def table_numbers(weights: int) -> int:
    """Return how many numbers a table of steps that are measured together has, for an estimate of memory. weights: of
    full attention in a step."""
    return weights * max(1, min(TOGETHER, TOGETHER_NUMBERS // weights))


def steps_together(shape: KVShape, positions: int, slots: int, spans: int, every: int | None) -> int:
    """Return how many steps are measured at a time. slots: of the widest KV head, whose weights a step holds; spans:
    their number; every: full KV's own attention is held of one step in `every`, None: of no step.

    With full KV's attention, the weights and sums of a method count as a quarter of the positions, whatever its slots
    and spans are: lanes of a race share full KV's passes only if they measure equally many steps at a time. Lost steps
    hold full KV's attention too, and are not counted."""
    held = max(1, slots + spans) if every is None else ceil(positions / 4) + ceil(positions / every)
    may_hold = max(HELD_NUMBERS, shape.layers * shape.kv_heads * positions * 2 * shape.head_dim // HELD_SHARE)
    of_layer = LAYER_NUMBERS // (shape.q_heads * max(positions, slots, spans))
    return max(1, min(TOGETHER, of_layer, may_hold // (shape.layers * shape.q_heads * held)))
