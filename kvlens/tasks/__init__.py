"""The tasks. To add one: write its file, add its line to BUILT_IN or to a storey's TASKS, or announce it by an entry
point `kvlens.tasks`.

A generated task is known by its name. A file of a published benchmark is named KIND:PATH, for example
ruler:data/niah_single_1.jsonl, where KIND is one of `file_kinds()`; some kinds have parameters, set behind the path
(gsm8k:test.jsonl@shots=32). Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import stat
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from kvlens.models.find import DEMO
from kvlens.plugins import plugins
from kvlens.refusal import Refusal
from kvlens.storeys import offered
from kvlens.tasks import filename
from kvlens.tasks.answers import RULE, contains
from kvlens.tasks.base import Encode, Encoding, Generation, Task, TaskPrompt, Unscored, ask, prompt_of

BUILT_IN = {
    "needle": "kvlens.tasks.demo:NEEDLE",
    "multikey": "kvlens.tasks.demo:MULTIKEY",
    "chain": "kvlens.tasks.demo:CHAIN",
    "note": "kvlens.tasks.demo:NOTE",
    "list": "kvlens.tasks.demo:LIST",
    "niah_single": "kvlens.tasks.needles:SINGLE",
    "niah_multikey": "kvlens.tasks.needles:MULTIKEY",
    "niah_multiquery": "kvlens.tasks.needles:MULTIQUERY",
    "niah_multivalue": "kvlens.tasks.needles:MULTIVALUE",
    "kv_lookup": "kvlens.tasks.needles:LOOKUP",
    "instruction_first": "kvlens.tasks.instructions:FIRST",
    "instruction_last": "kvlens.tasks.instructions:LAST",
    "instructions": "kvlens.tasks.instructions:SEVERAL",
    "countdown": "kvlens.tasks.countdown:COUNTDOWN",
    "countdown_among": "kvlens.tasks.countdown:AMONG",
    "months": "kvlens.tasks.months:MONTHS",
}


TOY = ("needle", "multikey", "list")
LOOKED_AT = 64 << 20
"""bytes of a file that a stored run names, above which it is not opened to score that run"""
PROSE = ("niah_single", "niah_multikey", "niah_multivalue", "kv_lookup")


class UnknownTask(ValueError):
    """A name that no task has."""


@cache
def built_in() -> dict[str, str]:
    """Return the generated tasks of the core and of every storey that offers some (`TASKS` of its module `tasks`), each
    with the place of its object."""
    places = dict(BUILT_IN)
    for storey in offered("tasks"):
        places |= storey.TASKS
    return places


@cache
def file_kinds() -> dict[str, str]:
    """Return the kinds of benchmark files that a storey offers (`FILES` of its module `tasks`), each with the place of
    its class."""
    return {kind: place for storey in offered("tasks") for kind, place in storey.FILES.items()}


def _load(path: str) -> Any:
    module, attribute = path.split(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def _plugins() -> tuple[dict[str, Task], dict[str, str]]:
    return plugins("task", {*built_in(), *file_kinds()}, _fault)


def _fault(name: str, found: Any) -> str | None:
    if not isinstance(found, Task):
        return "is no kvlens.tasks.base.Task"
    if found.name != name:
        return f"calls itself '{found.name}': both names must be one"
    _describe_task(found)  # what every list asks of it
    return None


@cache
def registry() -> dict[str, Task]:
    """Name -> task, of the product's generated tasks and of installed plugins."""
    return {name: _load(path) for name, path in built_in().items()} | _plugins()[0]


def refused() -> dict[str, str]:
    """Name -> one sentence, of installed plugins that are no tasks here, and why."""
    return _plugins()[1]


def forget() -> None:
    """Plugins are looked for again."""
    _plugins.cache_clear()
    registry.cache_clear()
    _known.cache_clear()


def get(name: str) -> Task:
    """A task by name, or the task of a file by KIND:PATH. Raises UnknownTask or ValueError with one sentence."""
    kind, sign, path = name.partition(":")
    if sign and kind in file_kinds():
        file, settings = filename.split(path)
        return _open(name, kind, file, settings, _stamp(Path(file)))
    tasks = registry()
    if name not in tasks and name in refused():
        raise UnknownTask(refused()[name])
    if name not in tasks:
        raise UnknownTask(f"unknown task '{name}'; known: {_known()}.")
    return tasks[name]


@cache
def _known() -> str:
    """Return the names of the tasks and kinds of files, as text."""
    return f"{', '.join(registry())}, and files as {', '.join(f'{kind}:PATH' for kind in file_kinds())}"


def _stamp(path: Path) -> int:
    try:
        file_stat = path.stat()
    except (OSError, ValueError):
        raise Refusal(f"there is no benchmark file '{path}'.", code="file_missing") from None
    if not (stat.S_ISREG(file_stat.st_mode) or stat.S_ISDIR(file_stat.st_mode)):
        raise ValueError(f"'{path}' is neither a file nor a folder.")
    return file_stat.st_mtime_ns


def _size(path: Path) -> int:
    """Bytes; 0 where there is none, or it is a folder."""
    try:
        file_stat = path.stat()
    except (OSError, ValueError):
        return 0
    return file_stat.st_size if stat.S_ISREG(file_stat.st_mode) else 0


@lru_cache(maxsize=16)
def _open(name: str, kind: str, path: str, given: tuple[tuple[str, str], ...], stamp: int) -> Task:
    opens = _load(file_kinds()[kind])
    task: Task = opens(Path(path), **filename.values(kind, getattr(opens, "parameters", {}), given))
    task.name = name
    return task


def catalogue() -> list[dict[str, Any]]:
    """The generated tasks as plain data, in order."""
    return [_describe_task(task) for task in registry().values()]


def _describe_task(task: Task) -> dict[str, Any]:
    names = ("name", "title", "summary", "metric", "new_tokens", "demo_language", "placed")
    return {name: getattr(task, name) for name in names}


def parameters() -> dict[str, dict[str, int | str]]:
    """Kind of file -> what can be set behind its path, with the defaults; kinds without parameters are left out."""
    settings_by_kind = {kind: dict(getattr(_load(path), "parameters", {})) for kind, path in file_kinds().items()}
    return {kind: settings for kind, settings in settings_by_kind.items() if settings}


def score(task: str, answer: str, output: str) -> float:
    """0..1 for the output of a stored run of a task. Raises UnknownTask or ValueError with one sentence."""
    try:
        return get(task).score(answer, output)
    except ArithmeticError as problem:  # an answer that is no number, of a task whose answers are
        raise Unscored(f"task '{task}' cannot score the answer '{answer[:40]}' ({type(problem).__name__}).") from None


def is_right(task: str | None, answer: str, output: str, alternatives: Sequence[str] = ()) -> bool:
    """As `judged`; what cannot be scored here is not called right."""
    return judged(task, answer, output, alternatives) is True


def judged(task: str | None, answer: str, output: str, alternatives: Sequence[str] = ()) -> bool | None:
    """Whether an output is the expected answer: the task's own score is full; None where that cannot be scored here. Of
    a prompt without a task, or with one that is not known here, the output has to contain the answer, or one of the
    `alternatives` that are right as well (kvlens.tasks.answers). A stored run may name any file: only one of at most
    LOOKED_AT bytes is opened for its score."""
    kind, sign, path = (task or "").partition(":")
    large = bool(sign) and kind in file_kinds() and _size(Path(filename.split(path)[0])) > LOOKED_AT
    if task and not large:
        try:
            return score(task, answer, output) == 1.0
        except Unscored:
            return None
        except ValueError:
            pass  # a task of a plugin or of a file that is not here any more
    return any(contains(output, text) for text in (answer, *alternatives))


def rule_of(task: str | None) -> str:
    """Return the name of the rule by which outputs are judged: of the task, or `contains`."""
    try:
        return f"task {get(task).name}" if task else RULE
    except ValueError:
        return RULE


def usual(model: str) -> tuple[str, ...]:
    """What a model is measured on unless it is said: the toy on its own language, any other on real prose."""
    return TOY if model == DEMO else PROSE


def remake(trial: Mapping[str, Any], encoding: Encoding) -> TaskPrompt:
    """The very prompt of a trial, from its keys task, length, depth, seed and index. Raises ValueError with one
    sentence."""
    task = get(str(trial["task"]))
    return ask(task, trial["length"], trial["depth"], int(trial["seed"]), encoding, int(trial.get("index") or 0))


__all__ = [
    "BUILT_IN",
    "Encode",
    "Encoding",
    "Generation",
    "Task",
    "TaskPrompt",
    "UnknownTask",
    "Unscored",
    "ask",
    "built_in",
    "catalogue",
    "file_kinds",
    "get",
    "is_right",
    "judged",
    "parameters",
    "prompt_of",
    "registry",
    "remake",
    "rule_of",
    "score",
    "usual",
]
