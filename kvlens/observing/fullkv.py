"""Full KV's own attention at the sampled steps of an observed run: full KV is fed the run's tokens once the block has
ended, from the shadow copy of the prompt, and the steps are measured again with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvlens.engine.alongside import Alongside
from kvlens.engine.rotary import frequencies_vary
from kvlens.observing.taken import Taken
from kvlens.observing.written import Shadow
from kvlens.recording.measure import measure
from kvlens.recording.snapshot import Snapshot
from kvlens.runs.preparing import Prepared

TOP_SPANS, RANKED = 16, 32
MOST_BYTES = 512 * 2**20
"""of weights and positions that wait for full KV; later steps have its masses not recorded"""
TOGETHER = 32
"""steps that full KV is fed at a time"""


class WaitingSteps:
    """Owns the snapshots of sampled steps until full KV's masses of these steps are computed."""

    def __init__(self) -> None:
        self._shots: dict[int, Snapshot] = {}
        self._bytes = 0

    def keep(self, number: int, shot: Snapshot) -> None:
        """Keep a sampled step. number: of the step, from 0 on."""
        size = sum(group.weights.nbytes + group.position.nbytes for group in shot.groups)
        if shot.sampled and self._bytes + size <= MOST_BYTES:
            self._bytes += size
            self._shots[number] = replace(shot, shadow=None)

    def discard(self) -> None:
        """Drop all snapshots."""
        self._shots.clear()

    def measure_again(self, prepared: Prepared, steps: Sequence[Taken], copies: Shadow, whole: bool) -> str | None:
        """Measure the kept steps with full KV's own attention. copies: keys and values as the model wrote them; whole:
        the prompt's are full KV's, else kvlens reads the prompt. Returns why masses are missing; None: none is."""
        prompt, loaded = prepared.prompt, prepared.engine.loaded
        tokens = len(prompt.ids) + len(prompt.asked)
        if frequencies_vary(loaded.model.config, tokens, len(prompt.ids) + len(steps)):
            return "the model's rotary frequencies change from step to step at this length"
        read = None if whole else prepared.engine.read(prompt, queries=1)
        pairs = copies.prompt(len(prompt.ids) - 1) if read is None else (read.keys, read.values)
        if pairs is None:
            return "there is no shadow copy of the prompt"
        beside, tokens_chosen = Alongside(loaded, *pairs, prompt.ids[-1], len(steps)), [step.token for step in steps]
        for start in range(0, len(steps), TOGETHER):
            numbers = range(start, min(start + TOGETHER, len(steps)))
            sampled = [self._shots[number].sampled if number in self._shots else () for number in numbers]
            rows = beside.attention(tokens_chosen[start : numbers.stop], sampled)
            if beside.why is not None:
                return beside.why
            for number, attention in zip(numbers, rows, strict=True):
                if attention is not None:
                    self._add(steps[number], self._shots.pop(number), attention, copies)
        return None

    def _add(self, step: Taken, shot: Snapshot, attention: torch.Tensor, copies: Shadow) -> None:
        """Replace the step's measures by those with full KV's attention [l, H_kv, G, n]."""
        shot.shadow, shot.reference = copies.keys(step.position + 1), attention
        again = measure([shot], TOP_SPANS, RANKED)[0]
        step.measured.oracle, step.measured.oracle_worst = again.oracle, again.oracle_worst
        step.measured.head |= {name: again.head[name] for name in ("reference_regret", "reference_unread")}
