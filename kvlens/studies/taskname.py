"""The name of a generated task with its settings: niah_single@length=1024@prompts=20@seed=0@depth=30."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvlens import tasks
from kvlens.tasks.base import MOST_LENGTH
from kvlens.text.prompts import BadPrompt

MOST_PROMPTS = 10_000
"""of a study"""


@dataclass(frozen=True)
class Setting:
    """A whole number that can be set of a generated task."""

    usual: int | None
    """None: it is not set"""
    least: int
    most: int


SETTINGS = {
    "length": Setting(1024, 1, MOST_LENGTH),
    "prompts": Setting(20, 1, MOST_PROMPTS),
    "seed": Setting(0, 0, 2**63 - 1),
    "depth": Setting(None, 0, 100),
}
"""length: tokens; depth: of the asked fact, in percent; without it, the prompts take several depths in turn"""


def task_settings(name: str) -> tuple[str, dict[str, int | None]] | None:
    """Return the task and the settings of a name; None where no generated task has the name in front of its settings.

    Raises BadPrompt `bad_setting` for a setting that does not exist, that is set twice, or has no number in its range.
    """
    task, *parts = name.split("@")
    if task not in tasks.registry():
        return None
    numbers: dict[str, int] = {}
    for part in parts:
        setting, _, text = part.partition("=")
        if setting not in SETTINGS:
            sentence = f"a generated task has no setting '{setting}'; it has {', '.join(SETTINGS)}."
            raise BadPrompt(sentence, code="bad_setting", setting=setting)
        if setting in numbers:
            raise BadPrompt(f"{name} sets {setting} twice: set it once.", code="bad_setting", setting=setting)
        numbers[setting] = _number(task, setting, text)
    return task, {setting: each.usual for setting, each in SETTINGS.items()} | numbers


def _number(task: str, setting: str, text: str) -> int:
    limits = SETTINGS[setting]
    number = int(text) if re.fullmatch("[0-9]{1,19}", text) else None
    if number is None or not limits.least <= number <= limits.most:
        sentence = (
            f"@{setting} of {task} takes a whole number from {limits.least:,} to {limits.most:,}, not '{text[:40]}'."
        )
        raise BadPrompt(sentence, code="bad_setting", setting=setting)
    return number
