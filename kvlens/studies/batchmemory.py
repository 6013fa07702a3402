"""The memory that a batch of a study's prompts takes, by arithmetic, before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from kvlens.models.device import expected
from kvlens.runs.memory import MemoryNeed, check_batch_memory, memory_need
from kvlens.runs.preflight import foresee
from kvlens.studies.plan import StudyPlan
from kvlens.studies.promptrow import StudyPrompt


def check_batch(plan: StudyPlan, prompts: Sequence[StudyPrompt], size: int) -> None:
    """Raise RunBeyondMemory where the longest prompts, as many as a batch has, take more memory on a CPU than is free.
    Each counts with the arm that takes the most."""
    if expected(plan.shared.device) != "cpu":
        return
    longest = sorted(prompts, key=lambda prompt: len(prompt.source.text), reverse=True)[:size]
    needs = [need for need in (_largest_need(plan, prompt) for prompt in longest) if need is not None]
    check_batch_memory(plan.shared, needs)


def _largest_need(plan: StudyPlan, prompt: StudyPrompt) -> MemoryNeed | None:
    """None where a prompt is refused for another reason, which its trials say, or its size is not known."""
    needs = []
    for arm in plan.arms():
        request = plan.request(arm)
        try:
            foreseen = foresee(request, prompt.source)
        except ValueError:
            continue
        if not isinstance(foreseen, str):
            needs.append(memory_need(request, foreseen.sizes))
    return max(needs, key=lambda need: need.total, default=None)
