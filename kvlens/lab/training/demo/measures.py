"""What is measured of the demo model, with the stock transformers code: exact match by place and length, controls,
surprisal, and which heads look at the asked fact. Decoding is greedy; an answer counts only when all of it and the
end-of-text token are right."""

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from kvlens.demo import language
from kvlens.demo.tasks import TaskPrompt, make_prompt, score
from kvlens.lab.training.demo import english
from kvlens.lab.training.demo.tokenizer import load_tokenizer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FIRST_SEED = 500_000
Shrink = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Demo:
    """Model and tokenizer, loaded as any user would load them."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def load(cls, path: Path, attention: str = "sdpa") -> "Demo":
        """Load in float32."""
        model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()
        return cls(model, load_tokenizer(path))

    def encode(self, text: str) -> list[int]:
        """Ids without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, task: str, length: int, depth: float, seed: int, **more: object) -> TaskPrompt:
        """A task's prompt."""
        return make_prompt(task, length, depth, seed, self.encode, **more)  # type: ignore[arg-type]

    @torch.no_grad()
    def answer(self, text: str, limit: int, shrink: Shrink | None = None) -> tuple[str, bool]:
        """Greedy continuation and whether it ended by itself; `shrink` picks the cache entries kept after prefill."""
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        cache = DynamicCache()
        count = ids.size(1)
        self.model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        if shrink is not None:
            keep = shrink(torch.arange(count - 1))
            layer: Any
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
        token = ids[:, -1:]
        tokens: list[int] = []
        for step in range(limit):
            position = torch.tensor([[count - 1 + step]])
            token = (
                self.model(token, past_key_values=cache, position_ids=position, use_cache=True)
                .logits[:, -1:]
                .argmax(-1)
            )
            if token.item() == self.tokenizer.eos_token_id:
                return str(self.tokenizer.decode(tokens)), True
            tokens.append(token.item())
        return str(self.tokenizer.decode(tokens)), False

    def score(self, prompt: TaskPrompt, shrink: Shrink | None = None) -> float:
        """The task's score; exact tasks must also end where the answer ends."""
        output, ended = self.answer(prompt.text, len(self.encode(prompt.answer)) + 8, shrink)
        return score(prompt.task, prompt.answer, output) if ended or prompt.task == "list" else 0.0


def streaming(budget: float, sinks: int = 4) -> Shrink:
    """The first tokens and the latest ones."""

    def shrink(index: torch.Tensor) -> torch.Tensor:
        recent = max(1, round(budget * len(index)) - sinks)
        return torch.cat((index[:sinks], index[-recent:]))

    return shrink


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean."""
    values = list(values)
    return sum(values) / len(values)


def by_depth(demo: Demo, task: str, length: int, per_depth: int, shrink: Shrink | None = None) -> list[float]:
    """Mean score at each of DEPTHS."""
    seeds = range(FIRST_SEED, FIRST_SEED + per_depth)
    return [mean(demo.score(demo.prompt(task, length, depth, seed), shrink) for seed in seeds) for depth in DEPTHS]


def over_depths(demo: Demo, task: str, length: int, count: int, **more: object) -> float:
    """Mean score, the depths taken in turn."""
    return mean(demo.score(demo.prompt(task, length, DEPTHS[i % 5], FIRST_SEED + i, **more)) for i in range(count))


def controls(demo: Demo, length: int, count: int) -> tuple[float, float]:
    """Share right with the needle removed; share that follows when the digits are replaced."""
    removed, follows = [], []
    for i in range(count):
        prompt = demo.prompt("multikey", length, DEPTHS[i % 5], FIRST_SEED + i)
        start, end = prompt.needle[0]
        limit = len(demo.encode(prompt.answer)) + 8
        text_without = prompt.text[:start] + prompt.text[end:].lstrip(" ")
        removed.append(score("multikey", prompt.answer, demo.answer(text_without, limit)[0]))
        new = language.digits(random.Random(i), 4)
        old = prompt.answer.strip(" .")
        fact = prompt.text[start:end].replace(old, new)
        changed = prompt.text[:start] + fact + prompt.text[end:]
        follows.append(score("multikey", f" {new}.", demo.answer(changed, limit)[0]))
    return mean(removed), mean(follows)


def real_haystack(demo: Demo, length: int, count: int) -> float:
    """Share right with held-out real English as the haystack."""
    _, held_out = english.split(english.collect())
    sentences = [
        s.strip().rstrip(".") + "." for d in held_out for p in d.paragraphs for s in " ".join(p.split()).split(". ")
    ]
    right = []
    for i in range(count):
        start = random.Random(i).randrange(len(sentences) // 2)
        prompt = demo.prompt("needle", length, DEPTHS[i % 5], FIRST_SEED + i, filler=sentences[start:])
        right.append(demo.score(prompt))
    return mean(right)


@torch.no_grad()
def surprisal(demo: Demo, window: int = 1024) -> dict[str, tuple[float, int]]:
    """Mean nats per token, and number of tokens, on held-out real English by place and by how common the word is."""
    training, held_out = english.split(english.collect())
    words = Counter(w.lower() for d in training for p in d.paragraphs for w in re.findall(r"[A-Za-z]+", p))
    unigram = Counter(i for d in training for p in d.paragraphs for i in demo.encode(" ".join(p.split())))
    total = sum(unigram.values()) + len(demo.tokenizer)
    sums: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        cell = sums.setdefault(name, [0.0, 0])
        cell[0], cell[1] = cell[0] + value, cell[1] + 1

    for document in held_out:
        text = "\n".join(" ".join(p.split()) for p in document.paragraphs)
        coded = demo.tokenizer(text, return_offsets_mapping=True)
        ids, offsets = coded["input_ids"][1:], coded["offset_mapping"][1:]
        for start in range(0, len(ids), window):
            part = ids[start : start + window]
            logits = demo.model(torch.tensor([[demo.tokenizer.bos_token_id, *part]])).logits[0, :-1]
            nats = F.cross_entropy(logits, torch.tensor(part), reduction="none").tolist()
            for token, value, (a, b) in zip(part, nats, offsets[start : start + window], strict=True):
                note("all tokens", value)
                note("(unigram frequencies of the training text)", -math.log((unigram[token] + 1) / total))
                piece, preceding = text[a:b], text[:a].rstrip(" ")
                if not piece.strip().isalpha():
                    continue
                begins = piece[0] == " " or a == 0 or text[a - 1] == "\n"
                if begins and (not preceding or preceding[-1] in ".\n"):
                    note("first token of a sentence", value)
                elif begins:
                    word = re.match(r"[A-Za-z]+", text[a:].lstrip(" "))
                    word_count = words[word[0].lower()] if word else 0
                    name = (
                        "rare (under 10 times in training)"
                        if word_count < 10
                        else "common (over 1000)"
                        if word_count > 1000
                        else "other"
                    )
                    note(f"first token of a word inside a sentence: {name}", value)
                else:
                    note("later token of a word", value)
    return {name: (cell[0] / cell[1], int(cell[1])) for name, cell in sums.items()}


@torch.no_grad()
def retrieval_heads(path: Path, length: int, count: int) -> torch.Tensor:
    """Mean attention mass on the asked fact's value while a right answer digit is made, [layers, query heads]."""
    demo = Demo.load(path, "eager")
    mass = torch.zeros(demo.model.config.num_hidden_layers, demo.model.config.num_attention_heads)
    steps = 0
    for i in range(count):
        prompt = demo.prompt("multikey", length, DEPTHS[i % 5], FIRST_SEED + i)
        coded = demo.tokenizer(prompt.text, return_offsets_mapping=True)
        start, end = prompt.needle[0]
        answer_start = start + prompt.text[start:end].index(prompt.answer.strip(" ."))
        value = [j for j, (a, b) in enumerate(coded["offset_mapping"]) if b > answer_start and a < end - 1]
        answer_tokens = demo.encode(prompt.answer)[: len(value)]
        ids = torch.tensor([[*coded["input_ids"], *answer_tokens]])
        count_prompt = len(coded["input_ids"])
        out = demo.model(ids, output_attentions=True)
        for step, token in enumerate(answer_tokens):
            position = count_prompt - 1 + step
            if out.logits[0, position].argmax().item() == token:
                mass += torch.stack([layer[0, :, position][:, value].sum(-1) for layer in out.attentions])
                steps += 1
    return mass / max(1, steps)
