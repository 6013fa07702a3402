"""Training rows of the demo model: a document and questions about it, real English, or a copied random string.

A row is exactly `length` tokens (padded at the end). Answers are marked by kind, so that exact match is known per kind
from the first step on and the loss can weigh answers and text apart.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvlens.demo import language
from kvlens.lab.training.demo.english import Document
from kvlens.lab.training.demo.tokenizer import Encoder

KINDS = (*language.FACT_KINDS, "chain", "list", "copy")
_KIND_WEIGHTS = (6, 3, 2, 2, 3, 3, 1)
MAX_POSITION = 5120


@dataclass
class Row:
    """Token ids with the answers' places: (start, end, index in KINDS)."""

    ids: list[int]
    answers: list[tuple[int, int, int]] = field(default_factory=list)
    real: bool = False


class RowMaker:
    """Draws rows; holds the encoder and the real English as ready token lists."""

    def __init__(self, encode: Encoder, documents: list[Document]) -> None:
        self.encode = encode
        self.paragraphs = [[" ".join(p.split()) for p in d.paragraphs] for d in documents]
        self.flat = [[encode("\n" + p) for p in d] for d in self.paragraphs]
        self.wrapped = [[encode("\n" + p) for p in d.paragraphs] for d in documents]
        self.sizes = [sum(map(len, d)) for d in self.flat]
        self.sentences = [s for d in self.paragraphs for p in d for s in self._sentences(p)]

    @staticmethod
    def _sentences(paragraph: str) -> list[str]:
        parts = [s.strip().rstrip(".") + "." for s in paragraph.split(". ")]
        return [s for s in parts if 25 < len(s) < 200]

    def copy_row(self, rng: random.Random, length: int) -> Row:
        """A random string repeated: the repeats are to be copied."""
        size = rng.randrange(12, max(13, length // 2))
        string = [rng.randrange(3, self.encode.size) for _ in range(size)]
        ids = ([self.encode.bos] + string * (length // size + 1))[:length]
        return Row(ids, [(1 + size, length, KINDS.index("copy"))])

    def english_row(self, rng: random.Random, length: int) -> Row:
        """Real English from a random place of a random document, other documents following."""
        ids = [self.encode.bos]
        while len(ids) < length:
            index = rng.choices(range(len(self.sizes)), self.sizes)[0]
            blocks = (self.flat if rng.random() < 0.6 else self.wrapped)[index]
            for block in blocks[rng.randrange(len(blocks)) :]:
                ids += block[1:] if len(ids) == 1 else block
                if len(ids) >= length:
                    break
        return Row(ids[:length], real=True)

    def _filler(self, rng: random.Random, english: float) -> list[int]:
        text = rng.choice(self.sentences) if rng.random() < english else language.filler(rng)
        return self.encode(" " + text)

    def task_row(self, rng: random.Random, length: int) -> Row:
        """A document of facts among filler, then questions with their answers."""
        share = rng.uniform(0.3, 0.6) if length < 512 else rng.uniform(0.12, 0.5)
        density = rng.choice((0.02, 0.1, 0.2, 0.3))
        english = rng.uniform(0.3, 1.0) if rng.random() < 0.25 else 0.0
        facts: list[str] = []
        questions: list[tuple[list[int], list[int], int]] = []
        used_keys: set[tuple[str, str]] = set()
        closed_place = ""
        used = 0

        def add(question: str, answer: str, kind: str, limit: float) -> bool:
            nonlocal used
            q, a = self.encode(language.ask(question)), [*self.encode(answer), self.encode.eos]
            if used + len(q) + len(a) > limit:
                return False
            questions.append((q, a, KINDS.index(kind)))
            used += len(q) + len(a)
            return True

        most = int((0.72 * length - 22) / 19)
        if rng.random() < 0.3:
            top = min(15, most)
            items = rng.randrange(8, top + 1) if top > 8 and rng.random() < 0.6 else rng.randrange(2, top + 1)
            entries, question, answer = language.make_list(rng, items)
            if add(question, answer, "list", 0.75 * length):
                facts += [fact.sentence for fact in entries]
                closed_place = entries[0].key.split()[0]
                if rng.random() < 0.5:
                    entry = rng.choice(entries)
                    add(entry.question, entry.answer, "place", 0.75 * length)
        elif rng.random() < 0.25:
            sentences, question, answer = language.make_chain(rng, rng.randrange(2, min(8, most) + 1))
            if add(question, answer, "chain", 0.75 * length):
                facts += sentences
        only = rng.choice(language.FACT_KINDS) if rng.random() < 0.4 else None

        def fresh(kinds: tuple[str, ...] = language.FACT_KINDS) -> language.Fact | None:
            kind = only or rng.choices(kinds, _KIND_WEIGHTS[: len(kinds)])[0]
            if kind == "note" and length < 192:
                kind = "code"
            fact = language.make_fact(rng, kind, invented=0.12)
            if (fact.kind, fact.key) in used_keys or (kind == "place" and fact.key.startswith(closed_place or "-")):
                return None
            used_keys.add((fact.kind, fact.key))
            return fact

        tries = 0
        while used < share * length and tries < 200:
            tries += 1
            fact = fresh()
            if fact is not None:
                if not add(fact.question, fact.answer, fact.kind, 0.75 * length):
                    break
                facts.append(fact.sentence)
        rng.shuffle(questions)
        pieces = [self.encode(" " + sentence) for sentence in facts]
        room = length - 6 - used - sum(map(len, pieces))
        while room > 0:
            fact = fresh(language.FACT_KINDS[:6]) if rng.random() < density else None
            piece = self.encode(" " + fact.sentence) if fact else self._filler(rng, english)
            room -= len(piece)
            if room >= 0:
                pieces.append(piece)
        rng.shuffle(pieces)
        first_piece = (
            self.encode(str(self.encode.tokenizer.decode(pieces[0])).lstrip()) if rng.random() < 0.7 else pieces[0]
        )
        row = Row([self.encode.bos, *first_piece])
        for piece in pieces[1:]:
            row.ids += piece
        for q, a, kind in questions:
            row.ids += q
            row.answers.append((len(row.ids), len(row.ids) + len(a), kind))
            row.ids += a
        del row.ids[length:]
        row.answers = [span for span in row.answers if span[1] <= length]
        row.ids += [0] * (length - len(row.ids))
        return row


def positions(rng: random.Random, row: Row, length: int, skip: float) -> torch.Tensor:
    """Position ids; with probability `skip` one to three gaps before the first answer, so that far distances are
    seen."""
    position = torch.arange(length)
    if rng.random() < skip and length < MAX_POSITION:
        end = max(3, row.answers[0][0] if row.answers else length)
        gaps = rng.randrange(1, 4)
        cuts = sorted(rng.randrange(1, end) for _ in range(gaps))
        widest = rng.randrange(MAX_POSITION - length + 1)
        jumps = sorted(rng.randrange(widest + 1) for _ in range(gaps))
        previous_jump = 0
        for cut, jump in zip(cuts, jumps, strict=True):
            position[cut:] += jump - previous_jump
            previous_jump = jump
    return position


def make_batch(
    maker: RowMaker, rng: random.Random, length: int, count: int, english: float, copy: float, skip: float
) -> tuple[list[Row], torch.Tensor, torch.Tensor]:
    """Rows, token ids [count, length] and position ids [count, length]."""
    rows: list[Row] = []
    for _ in range(count):
        draw = rng.random()
        make: Callable[[random.Random, int], Row] = maker.task_row
        if draw < english:
            make = maker.english_row
        elif draw < english + copy:
            make = maker.copy_row
        rows.append(make(rng, length))
    ids = torch.tensor([row.ids for row in rows])
    return rows, ids, torch.stack([positions(rng, row, length, skip) for row in rows])
