"""The demo model's tokenizer: byte-level BPE, any UTF-8 round-trips, every digit and every word of the demo language
one token.

`tokenizer(text)` begins with the beginning-of-text token (a post-processor), exactly as in training.
"""

import random
import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvlens.demo import language
from kvlens.lab.training.demo.english import Document

VOCABULARY = 2048
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPLIT = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII_SPLIT = re.compile(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def _texts(documents: list[Document], seed: int) -> list[str]:
    rng = random.Random(seed)
    texts = [paragraph for document in documents for paragraph in document.paragraphs]
    texts += [" ".join(paragraph.split()) for paragraph in texts]
    for _ in range(6000):
        texts.append(" " + language.filler(rng))
        fact = language.make_fact(rng, rng.choice(language.FACT_KINDS), invented=0.1)
        texts.append(f" {fact.sentence}{language.ask(fact.question)}{fact.answer}")
    for _ in range(500):
        sentences, question, answer = language.make_chain(rng, 3)
        texts.append(" " + " ".join(sentences) + language.ask(question) + answer)
        facts, question, answer = language.make_list(rng, 5)
        texts.append(" " + " ".join(fact.sentence for fact in facts) + language.ask(question) + answer)
    texts += [" " + word for word in language.vocabulary()] * 600
    return texts


def train_tokenizer(documents: list[Document], seed: int = 0, size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the demo language and on real English."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_texts(documents, seed), trainer)
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, core.token_to_id(BOS))]
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


class Encoder:
    """Fast encoding of ASCII text by a memory of pieces; equal to the tokenizer without special tokens (tested)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.bos, self.eos, self.size = tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)
        self._memory: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        if not text.isascii():
            return self.tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for piece in _ASCII_SPLIT.findall(text):
            known_values = self._memory.get(piece)
            if known_values is None:
                known_values = self.tokenizer.encode(piece, add_special_tokens=False)
                if len(self._memory) < 200_000:
                    self._memory[piece] = known_values
            ids += known_values
        return ids


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer stored in a model folder."""
    return PreTrainedTokenizerFast.from_pretrained(str(path))
