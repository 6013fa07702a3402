"""Generated prompts: what the form offers and the sample button runs."""

from __future__ import annotations

from kvlens import tasks
from kvlens.app.ui.common.request import PromptChoice
from kvlens.models.find import DEMO
from kvlens.tasks import Encoding
from kvlens.tasks.encoding import encoding as counted
from kvlens.tasks.sample import TITLE, sample_prompt

SAMPLE = ("multikey", 1024, 0.4, 4)
"""task, length in tokens, depth, seed of the toy's sample prompt"""


def sample(model: str) -> PromptChoice:
    """The prompt of the 'Run the sample prompt' button: a question about a real text, or one in the toy's language."""
    if model == DEMO:
        return generate(counted(DEMO), *SAMPLE)
    return PromptChoice(sample_prompt(), f"a question about {TITLE}")


def generate(encoding: Encoding, task: str, length: int, depth: float, seed: int) -> PromptChoice:
    """A generated task; ValueError with one sentence when the length does not hold it."""
    result = tasks.ask(tasks.get(task), length, depth, seed, encoding)
    return PromptChoice(tasks.prompt_of(result), f"{task}, {length} tokens, depth {depth:.0%}, seed {seed}")
