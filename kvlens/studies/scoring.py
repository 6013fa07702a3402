"""The score of a prompt by the task that it was drawn from, and what a trial was run with."""

from __future__ import annotations

from typing import Any

from kvlens import tasks
from kvlens.runs.preparing import Plan
from kvlens.studies.promptrow import StudyPrompt
from kvlens.tasks.encoding import encoding_of
from kvlens.text.plaintext import plain


class Scorer:
    """Scores outputs, prompt by prompt: a prompt of a task is made again once for all its arms."""

    def __init__(self) -> None:
        self._asked: tuple[str, tasks.TaskPrompt] | None = None
        """(id of the prompt, what its task made) of the prompt that was scored last"""

    def score(self, prompt: StudyPrompt, output: str, tokenizer: Any) -> float | None:
        """Return 0..1 by the prompt's task, with all that is known of the prompt; None where the task cannot score the
        output here."""
        if self._asked is None or self._asked[0] != prompt.id:
            self._asked = prompt.id, tasks.remake(prompt.drawn, encoding_of(tokenizer))
        try:
            return tasks.get(str(prompt.drawn["task"])).grade(self._asked[1], output)
        except tasks.Unscored:
            return None


def settings_of(planned: Plan) -> dict[str, Any]:
    """Return the preset that a trial was run with, and the parameters that it chose."""
    return {"ran_preset": planned.preset, "fitted": plain(dict(planned.chosen.fitted))}
