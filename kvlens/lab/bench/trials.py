"""One trial of a benchmark: a task's prompt, a method, a budget, and what came out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from kvlens import methods, tasks
from kvlens.engine.engine import Engine, Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.memory.budget import Budget, BudgetInfeasible
from kvlens.methods import calibration
from kvlens.methods.base import Method
from kvlens.methods.fitting import Chosen, Sizes, choose
from kvlens.runs.request import default_preset
from kvlens.studies.means import Means
from kvlens.tasks import Asked
from kvlens.tasks.encoding import encoding_of
from kvlens.text.prompts import Prompt, tokenize

NEW_TOKENS = {name: task.new_tokens for name, task in tasks.registry().items()}
"""tokens generated at most"""
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Trial:
    """What is run: prompt `index` of a task under a method. `budget` is a share of full KV, '' = no limit. Of a prompt
    that is read from a file, length and depth are None and index is its place in the file."""

    task: str
    length: int | None
    depth: float | None
    seed: int
    index: int
    method: str
    budget: str
    question: str = "in"
    """in: read and placed with its context; after: fed once the context was placed"""
    dtype: str = ""
    """number format, where it is not the table's own: the noise floor"""

    @property
    def prompt(self) -> tuple[str, int | None, float | None, int, int, str]:
        """What its prompt is made from."""
        return self.task, self.length, self.depth, self.seed, self.index, self.question


class Prompts:
    """Prompts in the model's own tokens, each made and read once for all trials that follow on it."""

    def __init__(self, engine: Engine, first_seed: int = 0, names: Sequence[str] = ()) -> None:
        """names: methods that will be asked for, so that the first reading serves them all."""
        self.engine, self.first_seed = engine, first_seed
        self._methods = [methods.get(name) for name in names]
        self._encoding = encoding_of(engine.loaded.tokenizer)
        self._key: tuple[Any, ...] | None = None
        self._asked: Asked | None = None
        self._prompt: Prompt | None = None
        self._read: ReadPrompt | None = None

    def __call__(self, task: str, length: int, index: int) -> tuple[Asked, Prompt, ReadPrompt]:
        """Prompt `index` of the quality table, whose depth goes round with the index."""
        trial = Trial(task, length, DEPTHS[index % len(DEPTHS)], self.first_seed + index, index, "", "")
        return self.asked(trial), self.prompt(trial), self.read(trial)

    def asked(self, trial: Trial) -> Asked:
        """The trial's prompt as text. Raises ValueError with one sentence."""
        if self._asked is None or self._key != trial.prompt:
            self._prompt = None
            self._asked = tasks.remake(asdict(trial), self._encoding)
            self._key = trial.prompt
        return self._asked

    def prompt(self, trial: Trial) -> Prompt:
        """In tokens. Raises BadPrompt when the model cannot take it."""
        prompt_text = self.asked(trial)
        if self._prompt is None:
            loaded, new = self.engine.loaded, tasks.get(trial.task).generation(trial.index).new_tokens
            self._prompt = tokenize(
                tasks.prompt_of(prompt_text), loaded.tokenizer, loaded.max_positions, new, question=trial.question
            )
        return self._prompt

    def read(self, trial: Trial, method: type[Method] = Method) -> ReadPrompt:
        """Prefilled, with all that `method` asks to see of it. Prompts that follow one another and are the same tokens,
        such as the context of several questions that are fed after it, are read once."""
        prompt = self.prompt(trial)
        if self._read is None or self._read.ids != prompt.ids or not self._read.serves(method):
            self._read = None  # two readings at a time are not held
            asking = (*self._methods, method)
            queries = max(128, *(method.needs.queries for method in asking))
            self._read = self.engine.read(
                prompt, queries=queries, received=any(method.needs.received for method in asking)
            )
        return self._read


class Formats:
    """A model in each number format that trials ask for, loaded when it is first needed, with the prompts read in
    it."""

    def __init__(
        self, model: str, device: str = "cpu", dtype: str = "float32", first_seed: int = 0, names: Sequence[str] = ()
    ) -> None:
        self.model, self.device, self.dtype, self.first_seed, self.names = model, device, dtype, first_seed, names
        self._loaded: dict[str, tuple[Engine, Prompts]] = {}

    def of(self, trial: Trial) -> tuple[Engine, Prompts]:
        """What the trial is run on. Raises UnsupportedModel with one sentence."""
        return self.at(trial.dtype or self.dtype)

    def at(self, dtype: str) -> tuple[Engine, Prompts]:
        """The model in that format, and its prompts. Raises UnsupportedModel with one sentence."""
        from kvlens.engine.models import load

        if dtype not in self._loaded:
            engine = Engine(load(self.model, self.device, dtype))
            self._loaded[dtype] = engine, Prompts(engine, self.first_seed, self.names if dtype == self.dtype else ())
        return self._loaded[dtype]


def settings(method: type[Method], model: str, budget: str) -> tuple[str | None, dict[str, Any], str]:
    """(preset, overrides, rule) by which a method is held to a share of full KV. Methods that keep every token on the
    device are held to a share of attended tokens instead, where they have a parameter `keep` for it; FullKV is held to
    nothing."""
    preset = default_preset(method.name, model)
    if not budget:
        return preset, {}, "none"
    if not method.keeps_all:
        return preset, {}, "resident bytes"
    share = Budget.parse(budget).amount
    return preset, {"keep": share}, "attended tokens"


def header(trial: Trial, model: str) -> dict[str, Any]:
    """What a row says of a trial before it is run."""
    preset, overrides, rule = settings(methods.get(trial.method), model, trial.budget)
    return {**asdict(trial), "rule": rule, "preset": preset, "overrides": overrides}


def carry_out(
    engine: Engine,
    prompts: Prompts,
    trial: Trial,
    changes: Mapping[str, Any] = MappingProxyType({}),
    answer: int | None = None,
) -> dict[str, Any]:
    """Run it -> one row of figures; `infeasible` (the smallest feasible share) where the budget cannot be kept,
    `refused` (a sentence) where the model cannot take the prompt or the method cannot be run on it. changes: parameters
    that are other than the trial's own. answer: tokens generated at most, with a budget for as many as the task's."""
    row = header(trial, engine.loaded.name)
    try:
        prompt_text, prompt = prompts.asked(trial), prompts.prompt(trial)
    except ValueError as error:
        return row | {"refused": str(error)}
    method = methods.get(trial.method)
    limit = Budget.parse(trial.budget) if row["rule"] == "resident bytes" else None
    drawn = tasks.get(trial.task).generation(trial.index)
    planned = drawn.new_tokens
    new = planned if answer is None else min(answer, planned)
    options = Options(new, drawn.seed, drawn.temperature, drawn.top_p, coverage=True, oracle="off", planned=planned)
    sink = Means()
    try:
        choice = changed(method, chosen(engine, prompt, method, row, limit, options), changes)
        row |= arm(choice, row)
        result = engine.run(prompt, method, choice.params, limit, options, sink, read=prompts.read(trial, method))
    except BudgetInfeasible as error:
        return row | infeasible(error)
    except ValueError as error:
        return row | {"refused": str(error)}
    row |= sink.figures() | outcome(prompt_text, result.text)
    asked_tokens = len(prompt.asked)
    full = engine.loaded.shape.full_kv_bytes(len(prompt.ids) + asked_tokens + planned)
    return row | {
        "prompt_tokens": len(prompt.ids) + asked_tokens,
        "resident_share": result.peak_bytes / full,
        "read_share": row["read_bytes_per_step"] / full,
        "moved_share": row["h2d_bytes_per_step"] / full,
        "cold_share": row["cold_bytes"] / full,
        "steps": len(result.ids) - asked_tokens,
        "passed": all(check.passed for check in result.checks),
        "uid": None,
    }


def chosen(
    engine: Engine, prompt: Prompt, method: type[Method], row: dict[str, Any], limit: Budget | None, options: Options
) -> Chosen:
    """The parameters of a trial: those of the row's preset, of the preset `fit` where these do not fit. Raises
    ValueError with one sentence where figures of the model are missing or not of it."""
    context = engine.context(prompt, limit, options)
    sizes = Sizes(context.shape, context.prompt_tokens, context.max_new, context.budget_bytes)
    choice = choose(method, None, row["preset"], row["overrides"], sizes)
    calibration.given(method, choice.params, context.shape, context.model_name)
    return choice


def changed(method: type[Method], choice: Chosen, changes: Mapping[str, Any]) -> Chosen:
    """The same parameters but for `changes`, so that two arms differ in nothing else. Raises ValueError with one
    sentence for what the method does not take."""
    if not changes:
        return choice
    converted = methods.converted(method, changes)
    return replace(choice, params=replace(choice.params, **converted), fitted={**choice.fitted, **converted})


def missing(model: str, names: tuple[str, ...]) -> list[str]:
    """One sentence per method that lacks figures of the model, with the command that makes them: its trials are
    refused, the others run."""
    sentences = []
    for name in names:
        method = methods.get(name)
        try:
            calibration.require(method, methods.make_parameters(method, default_preset(name, model), {}), model)
        except ValueError as error:
            sentences.append(f"{error} Its trials are refused; the other methods run.")
    return sentences


def arm(choice: Chosen, row: dict[str, Any]) -> dict[str, Any]:
    """What a row says of the parameters it was run with; what `fit` came to is among its overrides."""
    return {"preset": choice.preset, "overrides": {**choice.fitted, **row["overrides"]}}


def infeasible(error: BudgetInfeasible) -> dict[str, Any]:
    """The column of a trial whose budget cannot be kept: the smallest share of full KV that could be."""
    return {"infeasible": round(error.smallest / error.full, 4)}


def outcome(prompt: Asked, output: str) -> dict[str, Any]:
    """Score and texts of a trial; `exact` is a full score."""
    right = tasks.get(prompt.task).grade(prompt, output)
    return {"exact": float(right == 1.0), "score": right, "output": output[:200], "answer": prompt.answer[:200]}
