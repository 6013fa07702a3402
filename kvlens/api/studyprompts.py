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
    from kvlens.runs.request import RunRequest
    from kvlens.studies.promptfile import ReadPrompts
    from kvlens.studies.promptrow import StudyPrompt

StudyPromptLike = str | Path | Prompt | PromptText | Mapping[str, Any]
"""a file or a generated task by name, a prompt of kvlens, or a row with `question`, `context`, `answer`, ..."""


def study_prompts(
    prompts: StudyPromptLike | Sequence[StudyPromptLike],
    shared: RunRequest,
    models: Named | Given,
    segments: Mapping[str, str | tuple[int, int]] | None = None,
) -> ReadPrompts:
    """Return the prompts of a study, and a sentence for each row that is none. shared: what all its runs have in
    common; segments: named in every prompt. Raises RequestError `no_prompts` for none, `bad_prompt` for two prompts of
    one id, BadTemplate for an argument that the chat template lacks."""
    from kvlens.studies.promptfile import ReadPrompts, in_segments, read_prompts, without_repeats
    from kvlens.studies.promptrow import StudyPrompt
    from kvlens.studies.promptrow import prompt_of as of_row
    from kvlens.tasks.encoding import counting

    tokenizer = models.loaded.tokenizer if isinstance(models, Given) else None
    counted = counting(shared.model, shared.chat, shared.system, shared.chat_args, tokenizer)
    items = [prompts] if isinstance(prompts, str | Path | Prompt | PromptText | Mapping) else list(prompts)
    if not items:
        raise RequestError("no_prompts", "a study needs at least one prompt: pass files, tasks or prompts.")
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
    rows, unmarked = in_segments(rows, list((segments or {}).items()))
    if unmarked and not rows:
        raise RequestError("bad_segment", f"no prompt is left to study. {unmarked[0]}")
    rows, repeats = without_repeats(rows)
    return ReadPrompts(tuple(rows), (*faults, *unmarked, *repeats))
