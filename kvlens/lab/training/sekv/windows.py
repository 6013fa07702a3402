"""Places of text that the training draws, and what the frozen model gives for them, once each if they are kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedModel

from kvlens.engine.hf_attention import attending
from kvlens.lab.training.sekv.examples import Example, draw, prepare_all
from kvlens.lab.training.sekv.seam import ATTENTION
from kvlens.lab.training.sekv.settings import SeKVTraining
from kvlens.methods.sekv.params import SeKVParameters

TOKENS_AT_ONCE = 8192
"""tokens that the frozen model reads at once, so that its logits fit in memory"""
READERS = 3
"""threads that prepare places on a CUDA device: the device reads for one while the processor decomposes for another"""


class Windows:
    """Owns the places that are kept, of one length at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        params: SeKVParameters,
        settings: SeKVTraining,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.model, self.params, self.settings, self.progress = model, params, settings, progress
        self._kept: dict[bool, dict[int, Example | None]] = {False: {}, True: {}}
        """held out or not -> place -> what the model gives"""
        self._length = 0

    def draw(
        self, documents: Sequence[Sequence[int]], length: int, count: int, rng: random.Random, held_out: bool
    ) -> list[Example]:
        """Return `count` places of the documents, drawn by rng, without those that have no span: any places, or of the
        places that are kept."""
        if not self.settings.kept_tokens:
            drawn = self._read([draw(documents, length, rng) for _ in range(count)], length, torch.float32)
            return [example for example in drawn if example is not None]
        places = max(1, self.settings.kept_tokens // length) if not held_out else count
        if self._length != length and not held_out:
            self._kept[False] = {}
            self._length = length
        if not self._kept[held_out]:
            self._kept[held_out] = self._fill(documents, length, places, held_out)
        numbers = range(count) if held_out else [rng.randrange(places) for _ in range(count)]
        drawn = [self._kept[held_out][place] for place in numbers]
        return [example for example in drawn if example is not None]

    def _fill(
        self, documents: Sequence[Sequence[int]], length: int, places: int, held_out: bool
    ) -> dict[int, Example | None]:
        """Return what the model gives for all places of a length. A place depends on seed, length and its number."""
        seeds = [random.Random(f"{self.settings.seed}/{(length, place, held_out)}") for place in range(places)]
        ids = [draw(documents, length, seed) for seed in seeds]
        kept_as = torch.float16 if self.settings.kept_half else torch.float32
        return dict(enumerate(self._read(ids, length, kept_as)))

    def _read(self, ids: Sequence[Sequence[int]], length: int, kept_as: torch.dtype) -> list[Example | None]:
        at_once = max(1, TOKENS_AT_ONCE // length)
        groups = [ids[i : i + at_once] for i in range(0, len(ids), at_once)]
        cap = int(self.params.anchor_share * self.settings.budget * length)

        def examples(group: Sequence[Sequence[int]]) -> list[Example | None]:
            return prepare_all(self.model, group, self.settings.suffix, self.params, cap, kept_as)

        results: list[Example | None] = []
        with attending(self.model, ATTENTION), ThreadPoolExecutor(self._readers()) as pool:
            for group in pool.map(examples, groups):
                results += group
                if self.progress and len(groups) > 1:
                    self.progress({"places": len(results), "of_places": len(ids), "length": length})
        return results

    def _readers(self) -> int:
        return READERS if self.model.device.type == "cuda" else 1
