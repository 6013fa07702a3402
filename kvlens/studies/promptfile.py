"""The prompts of a study, read from what a person names: files of one or of many prompts, benchmark files, generated
tasks. A mistaken line is named by its number and left out; the others are there."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvlens import tasks
from kvlens.studies.promptrow import StudyPrompt, prompt_of, task_prompt
from kvlens.studies.taskname import MOST_PROMPTS, task_settings
from kvlens.tasks.base import Encoding
from kvlens.text.promptfiles import SUFFIXES, folder_refused, read_prompt
from kvlens.text.prompts import BadPrompt, with_segments
from kvlens.text.segments import BadSegment

MOST_BYTES = 256 << 20
"""of a file of prompts, unpacked"""
ROWS = (".jsonl", ".jsonl.gz", ".csv")
"""ends of the names of files that hold a prompt a row"""
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""places of the asked fact in generated prompts, one after the other"""


@dataclass(frozen=True)
class ReadPrompts:
    """What was read."""

    prompts: tuple[StudyPrompt, ...]
    faults: tuple[str, ...]
    """one sentence for every row that was left out"""


def read_prompts(
    names: Iterable[str], encoding: Callable[[], Encoding], segments: Sequence[tuple[str, str | tuple[int, int]]] = ()
) -> ReadPrompts:
    """Return the prompts of all `names`.

    Each of them is
    - a file: .jsonl, .jsonl.gz or .csv with one prompt a row, .json with one prompt, a list of them or chat messages,
      .txt or .md with one prompt;
    - KIND:PATH of a published benchmark (kvlens.tasks.file_kinds);
    - a generated task with its settings, for example niah_single@length=1024@prompts=20@seed=0.

    Args:
        encoding: returns how prompts are counted; called for generated tasks and benchmark files alone.
        segments: (name, marker or range), named in every prompt; a prompt without one of them is left out.

    Raises BadPrompt or ValueError with one sentence where not one prompt is left, or a name stands for nothing.
    """
    prompts: list[StudyPrompt] = []
    faults: list[str] = []
    for name in names:
        for item in _prompts_in(name, encoding):
            if isinstance(item, StudyPrompt):
                prompts.append(item)
            else:
                faults.append(item)
        if len(prompts) > MOST_PROMPTS:
            raise BadPrompt(f"a study takes {MOST_PROMPTS:,} prompts at most: cut the file down.")
    prompts, unmarked = in_segments(prompts, segments)
    prompts, repeats = without_repeats(prompts)
    faults += (*unmarked, *repeats)
    if not prompts:
        raise BadPrompt(f"no prompt is left to study. {faults[0]}" if faults else "a study needs at least one prompt.")
    return ReadPrompts(tuple(_distinct(prompts)), tuple(faults))


def _prompts_in(name: str, encoding: Callable[[], Encoding]) -> Iterator[StudyPrompt | str]:
    """The prompts that a name stands for, and a sentence for each row that is none."""
    path = Path(name)
    if path.is_file():
        yield from _of_file(path)
        return
    kind, colon, _ = name.partition(":")
    if colon and kind in tasks.file_kinds():
        yield from _of_task(name, tasks.get(name).items or 0, None, 0, encoding())
        return
    if path.is_dir():
        raise folder_refused(name, (*ROWS, *SUFFIXES))
    settings = task_settings(name)
    if settings is None:
        raise BadPrompt(f"'{name}' is no file and no task: name a file, KIND:PATH or a task (`kvlens bench tasks`).")
    task, values = settings
    depth = None if values["depth"] is None else values["depth"] / 100
    yield from _of_task(task, values["prompts"] or 0, values["length"], values["seed"] or 0, encoding(), depth)


def _of_task(
    name: str, count: int, length: int | None, seed: int, encoding: Encoding, depth: float | None = None
) -> Iterator[StudyPrompt | str]:
    """depth: of the asked fact in all prompts; None: it goes round."""
    for index in range(count):
        place = depth if depth is not None or length is None else DEPTHS[index % len(DEPTHS)]
        try:
            yield task_prompt(name, length, place, seed + index, index, encoding, f"{_short(name)}-{index}")
        except ValueError as error:
            yield f"prompt {index} of {name}: {error}"


def _of_file(path: Path) -> Iterator[StudyPrompt | str]:
    lower, stem = path.name.lower(), path.name.partition(".")[0]
    if lower.endswith((".jsonl", ".jsonl.gz")):
        yield from _of_rows(_json_lines(_text_of(path)), "line", stem)
    elif lower.endswith(".csv"):
        yield from _of_rows(_csv_rows(_text_of(path), path.name), "line", stem)
    elif lower.endswith(".json"):
        yield from _of_json(path, stem)
    else:
        yield StudyPrompt(stem, read_prompt(path))


def _of_json(path: Path, stem: str) -> Iterator[StudyPrompt | str]:
    try:
        data = json.loads(_text_of(path))
    except (ValueError, RecursionError):
        raise BadPrompt(f"{path.name} is not valid JSON.") from None
    if not isinstance(data, list):
        needed = isinstance(data, Mapping) and isinstance(data.get("text"), str)
        yield StudyPrompt(stem, read_prompt(path)) if needed else prompt_of(data, stem, path.name)
    elif data and all(isinstance(item, Mapping) and "role" in item for item in data):
        yield prompt_of({"messages": data}, stem, path.name)
    else:
        yield from _of_rows(enumerate(data, 1), "entry", stem)


def _of_rows(rows: Iterable[tuple[int, Any]], word: str, stem: str) -> Iterator[StudyPrompt | str]:
    for number, row in rows:
        name = f"{word} {number}"
        if isinstance(row, str):
            yield f"{name} {row}"
            continue
        try:
            yield prompt_of(row, f"{stem}-{number}", name)
        except (BadPrompt, BadSegment) as error:
            text = str(error)
            yield text if text.startswith(name) else f"{name}: {text}"


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError):
            yield number, "is not valid JSON."


def _csv_rows(text: str, name: str) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if not reader.fieldnames or not {"question", "text"} & set(reader.fieldnames):
        raise BadPrompt(f'{name} has no column "question" or "text": name its columns in the first line.')
    for row in reader:
        values = {str(key): value for key, value in row.items() if key is not None and value}
        if "answers" in values:
            values["answers"] = [part.strip() for part in values["answers"].split("|")]
        yield reader.line_num, values


def _text_of(path: Path) -> str:
    """The text of a file, unpacked where it is packed. Raises BadPrompt."""
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path) as file:
                data = file.read(MOST_BYTES + 1)
        else:
            with path.open("rb") as plain:
                data = plain.read(MOST_BYTES + 1)
    except (OSError, EOFError) as error:
        raise BadPrompt(f"{path.name} cannot be read ({type(error).__name__}).") from None
    if len(data) > MOST_BYTES:
        raise BadPrompt(f"{path.name} has more than {MOST_BYTES:,} bytes: cut it down.")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise BadPrompt(f"{path.name} is not UTF-8 text (byte {error.start:,}): save it as UTF-8.") from None


def _short(name: str) -> str:
    """A task's name without the folders of its file."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{Path(path).name}" if colon else name


def in_segments(
    prompts: Iterable[StudyPrompt], pairs: Sequence[tuple[str, str | tuple[int, int]]]
) -> tuple[list[StudyPrompt], list[str]]:
    """Return the prompts with segments of (name, marker or range), and a sentence for each prompt that lacks one."""
    if not pairs:
        return list(prompts), []
    marked, sentences = [], []
    for prompt in prompts:
        try:
            marked.append(replace(prompt, source=with_segments(prompt.source, pairs)))
        except BadSegment as error:
            sentences.append(f"{prompt.id}: {error}")
    return marked, sentences


def without_repeats(prompts: Iterable[StudyPrompt]) -> tuple[list[StudyPrompt], list[str]]:
    """Return the prompts, each once, and a sentence for every repeat: the same prompt twice is no second
    observation."""
    by_content: dict[str, StudyPrompt] = {}
    sentences = []
    for prompt in prompts:
        if prompt.content in by_content:
            sentences.append(f"{prompt.id} is the same prompt as {by_content[prompt.content].id}.")
        else:
            by_content[prompt.content] = prompt
    return list(by_content.values()), sentences


def _distinct(prompts: Iterable[StudyPrompt]) -> Iterator[StudyPrompt]:
    """The prompts, of which no two have one id."""
    counts: Counter[str] = Counter()
    for prompt in prompts:
        counts[prompt.id] += 1
        count = counts[prompt.id]
        yield prompt if count == 1 else replace(prompt, id=f"{prompt.id}#{count}")
