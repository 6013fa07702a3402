"""What CHESS's claims are measured on: tasks, lengths and shares by model, and the prompts with what is fed behind
them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlens.demo.tasks import make_prompt
from kvlens.engine.engine import Engine, Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.bench.trials import Prompts
from kvlens.lab.calibrate.methods.chess import QUESTIONS, excerpt
from kvlens.methods.full import FullKV, FullParameters
from kvlens.models.find import DEMO
from kvlens.tasks.encoding import encoding_of
from kvlens.tasks.texts import sentences
from kvlens.text.prompts import Prompt, PromptText, tokenize

LENGTH = 2048
FIRST_SEED = 6_500_000
NEW = 128
EXPLAINED = 104
"""tokens of a long answer at most: with a fixed interval of 6 pages of 8 tokens, two selections come in them"""
KEEP = (0.05, 0.1, 0.2, 0.4, 0.7)
"""shares of attended tokens; sinks and window alone are 2.3 % of 2,048 tokens and 4.7 % of 1,024, so the paper's 1 %
cannot be had"""


@dataclass(frozen=True)
class Source:
    """A kind of prompt, and which claims it is for."""

    task: str
    size: int = 1
    """entries of a list or hops of a chain, of the demo model's tasks"""
    keyed: bool = True
    """it has one right answer, which is fed; else full KV's own words are"""
    long: bool = False
    """its answers are long enough for the triggers to be compared"""


@dataclass(frozen=True)
class Setting:
    """What differs by model."""

    named: str
    """the model, as a sentence says it"""
    length: int
    """prompt tokens"""
    sources: tuple[Source, ...]
    keep: tuple[float, ...]
    """shares of attended tokens for answers that are right or wrong"""
    keep_long: tuple[float, ...]
    """and for long answers, under both triggers"""
    fed: str
    """what is fed in long answers"""
    own_words: tuple[float, ...]
    """shares at which CHESS goes on in its own words, too, to see how often it triggers"""


EXCERPT = "excerpt"
TOY = Setting(
    "the demo model",
    LENGTH,
    (Source("list", 12, long=True), Source("chain", 6, long=True), Source("note", long=True)),
    KEEP,
    KEEP,
    "the right answer",
    (),
)
"""answers of about 100, 47 and 20 tokens"""
PROSE = (Source("niah_single"), Source("niah_multikey"), Source(EXCERPT, keyed=False, long=True))
"""facts that full KV answers to a useful degree; and a question about a text that asks for a long answer, which has no
key (a small model cannot do tasks with a long one)"""


def setting(model: str) -> Setting:
    """What a model is measured on."""
    if model == DEMO:
        return TOY
    return Setting(model, 1024, PROSE, KEEP, (0.1, 0.4), "full KV's own answer", (0.1,))


@dataclass(frozen=True)
class Case:
    prompt: Prompt
    read: ReadPrompt
    answer: tuple[int, ...]
    needle: tuple[tuple[int, int], ...] = field(default=())
    """character ranges of the asked facts"""


class Cases:
    """The prompts of a setting, each read once, with what is fed behind it."""

    def __init__(self, engine: Engine, at: Setting) -> None:
        self.engine, self.at = engine, at
        self._prompts = Prompts(engine, FIRST_SEED)
        self._encoding = encoding_of(engine.loaded.tokenizer)

    def __call__(self, source: Source, index: int) -> Case:
        """Prompt `index` of a source."""
        if self.at is TOY:
            return toy_case(self.engine, source.task, source.size, index)
        if source.task == EXCERPT:
            return self._excerpt(index)
        asked, prompt, read = self._prompts(source.task, self.at.length, index)
        return Case(prompt, read, tuple(self._encoding.encode(asked.answer)), asked.needle)

    def _excerpt(self, index: int) -> Case:
        loaded, size = self.engine.loaded, self.at.length - self._encoding.special
        question = QUESTIONS[index % len(QUESTIONS)]
        source = excerpt(loaded.tokenizer, " ".join(sentences()), size, FIRST_SEED + index, question)
        prompt = tokenize(source, loaded.tokenizer, loaded.max_positions, EXPLAINED)
        read = self.engine.read(prompt)
        said = self.engine.run(prompt, FullKV, FullParameters(), options=Options(max_new=EXPLAINED), read=read)
        return Case(prompt, read, tuple(said.ids))


def toy_case(engine: Engine, task: str, size: int, index: int) -> Case:
    """Prompt `index` of a task of the demo language, read once, and its right answer in tokens."""
    tokenizer = engine.loaded.tokenizer

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    source = make_prompt(task, LENGTH, (index % 5) / 4, FIRST_SEED + index, encode, items=size, hops=size)
    prompt = tokenize(PromptText(source.text), tokenizer, engine.loaded.max_positions, NEW)
    return Case(prompt, engine.read(prompt), tuple(encode(source.answer)), source.needle)
