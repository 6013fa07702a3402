"""The prompts of `kvlens.study`: files, generated tasks, rows, and prompts of kvlens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.api.errors import RequestError
from kvlens.api.models import Given, Named
from kvlens.api.prompts import prompt_of
from kvlens.text.prompts import Prompt, PromptText

if TYPE_CHECKING:
    from kvlens.studies.promptfile import ReadPrompts
    from kvlens.studies.promptrow import StudyPrompt

StudyPromptLike = str | Path | Prompt | PromptText | Mapping[str, Any]
"""a file or a generated task by name, a prompt of kvlens, or a row with `question`, `context`, `answer`, ..."""


def study_prompts(
    prompts: StudyPromptLike | Sequence[StudyPromptLike],
    model: str,
    models: Named | Given,
    chat: str,
    system: str | None,
) -> ReadPrompts:
    """Return the prompts of a study, and a sentence for each row that is none. Raises RequestError `bad_prompt` for two
    prompts of one id."""
    from kvlens.studies.promptfile import ReadPrompts, read_prompts, without_repeats
    from kvlens.studies.promptrow import StudyPrompt
    from kvlens.studies.promptrow import prompt_of as of_row
    from kvlens.tasks.base import Encoding
    from kvlens.tasks.encoding import encoding, encoding_of

    def counted() -> Encoding:
        if isinstance(models, Given):
            return encoding_of(models.loaded.tokenizer, chat, system)
        return encoding(model, chat, system)

    items = [prompts] if isinstance(prompts, str | Path | Prompt | PromptText | Mapping) else list(prompts)
    rows: list[StudyPrompt] = []
    faults: list[str] = []
    for number, item in enumerate(items):
        if isinstance(item, str | Path):
            part = read_prompts([str(item)], counted)
            rows += part.prompts
            faults += part.faults
        elif isinstance(item, Mapping):
            rows.append(of_row(item, f"prompt-{number}", f"prompt {number}"))
        else:
            rows.append(StudyPrompt(f"prompt-{number}", prompt_of(item, None, None, None).prompt))
    if len({row.id for row in rows}) < len(rows):
        raise RequestError("bad_prompt", "two prompts of the study have one id: give each its own.")
    rows, repeats = without_repeats(rows)
    return ReadPrompts(tuple(rows), (*faults, *repeats))
