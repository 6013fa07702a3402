"""Which KV heads of a model retrieve: gates trained on documents that hide passages and recite them at their end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvlens.demo.tasks import make_prompt
from kvlens.engine.models import LoadedModel
from kvlens.lab.calibrate.methods.duoattention_gates import Trainer
from kvlens.lab.calibrate.provenance import provenance, save
from kvlens.lab.calibrate.texts import sentences
from kvlens.tasks import texts, words

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True)
class Settings:
    """Lengths are in tokens. The paper's, scaled to models and machines that are small: it makes 2,000 steps at a rate
    of .02 on documents of 1,000 to 32,000 tokens with 10 passkeys of 32 words, 128 sinks and 256 recent tokens."""

    steps: int = 30
    length: int = 512
    keys: int = 4
    words: int = 8
    sinks: int = 16
    recent: int = 64
    rate: float = 0.05
    weight: float = 0.5
    """of the sum of all gates; the paper's .05, for hidden states of thousands of numbers, leaves the gates of small
    models within .1 of 1"""
    seed: int = 0


@dataclass(frozen=True)
class Document:
    """Text, and where in it stands what is recited."""

    text: str
    recited: tuple[tuple[int, int], ...]
    """character ranges"""


def passkeys(
    rng: random.Random, hay: Sequence[str], room: int, settings: Settings, size: Callable[[str], int]
) -> Document:
    """Sentences of `hay` from a drawn place, with keys of drawn words between them, all recited at the end; `room`
    tokens at most, by `size`."""
    keys = [
        f"The {ORDINALS[index]} key is: {' '.join(rng.choice(words.NOUNS) for _ in range(settings.words))}."
        for index in range(settings.keys)
    ]
    room -= 2 * sum(map(size, keys)) + 8
    start = rng.randrange(len(hay))
    pieces: list[str] = []
    while (room := room - size(piece := hay[(start + len(pieces)) % len(hay)])) >= 0:
        pieces.append(piece)
    for key in keys:
        pieces.insert(rng.randrange(len(pieces) + 1), key)
    text, recited = " ".join(pieces) + "\n\n", []
    for key in keys:
        recited.append((len(text) + key.index(":") + 1, len(text) + len(key)))
        text += key + "\n"
    return Document(text, tuple(recited))


def questions(rng: random.Random, length: int, encode: Callable[[str], list[int]]) -> Document:
    """A document in the demo model's language, with its answer: it can recite no other."""
    task = rng.choice(("note", "multikey", "list"))
    result = make_prompt(task, length - 128, rng.random(), rng.randrange(10**6) + 11_000_000, encode)
    text = result.text + result.answer
    return Document(text, ((len(result.text), len(text)),))


def tokens(loaded: LoadedModel, document: Document) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [1, n], and bool [n]: the tokens from which what is recited is told, one before each of it."""
    result = loaded.tokenizer(document.text, return_offsets_mapping=True, add_special_tokens=False)
    begin = [] if loaded.model.config.bos_token_id is None else [int(loaded.model.config.bos_token_id)]
    offsets = [(0, 0)] * len(begin) + [tuple(offset) for offset in result["offset_mapping"]]
    inside = [any(b > start and a < end for start, end in document.recited) for a, b in offsets]
    counted = torch.tensor([*inside[1:], False], device=loaded.model.device)
    return torch.tensor([begin + list(result["input_ids"])], device=loaded.model.device), counted


def calibrate(
    loaded: LoadedModel,
    out: Path,
    source: Sequence[str] = (),
    settings: Settings | None = None,
    report: Callable[[dict[str, Any]], None] = lambda figures: None,
    rows: Sequence[dict[str, Any]] = (),
) -> Path:
    """Train and write the gates. source: texts whose sentences are the documents' filler, `rows` their names; none:
    the text that calibrations are made of here. Raises ValueError with one sentence for a text too short."""
    settings = settings or Settings()
    shape, rng = loaded.shape, random.Random(settings.seed)

    def encode(text: str) -> list[int]:
        return list(loaded.tokenizer.encode(text, add_special_tokens=False))

    own_value = loaded.name == "demo" and not source
    hay = [sentence for text in source for sentence in sentences(text)] or list(texts.sentences(texts.CALIBRATION))
    if len(hay) < 8:
        raise ValueError("the texts have too few sentences to hide anything between them: give longer ones.")
    trainer = Trainer(
        loaded.model, (shape.layers, shape.kv_heads), settings.sinks, settings.recent, settings.rate, settings.weight
    )
    for step in range(settings.steps):
        document = (
            questions(rng, settings.length, encode)
            if own_value
            else passkeys(rng, hay, settings.length, settings, lambda piece: len(encode(piece)) + 1)
        )
        figures = trainer.advance(*tokens(loaded, document))
        report({"step": step + 1, **figures})
    corpus = texts.CALIBRATION.title
    documents = (
        "the demo model's own tasks note, multikey and list"
        if own_value
        else f"passkeys in {'texts' if source else corpus}"
    )
    origin = provenance(loaded, **asdict(settings), documents=documents, texts=list(rows))
    gates = [[round(float(gate), 4) for gate in layer] for layer in trainer.alpha.detach()]
    return save(out, "duoattention", {"gates": gates}, origin)
