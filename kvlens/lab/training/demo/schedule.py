"""How the demo model is trained: work per step, and the curriculum with its step counts."""

from dataclasses import dataclass

PROCESSES = 2
TOKENS_PER_PROCESS = 2048
LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum: row length, steps at full scale, share of copy rows and real English, seconds a step
    takes."""

    length: int
    steps: int
    copy: float
    english: float
    skip: float
    cost: float


STAGES = (
    Stage(96, 600, 0.15, 0.2, 0.2, 0.4),
    Stage(256, 1000, 0.05, 0.25, 0.5, 0.53),
    Stage(512, 900, 0.04, 0.25, 0.5, 0.7),
    Stage(1024, 800, 0.02, 0.25, 0.5, 0.9),
    Stage(2048, 750, 0.0, 0.25, 0.4, 1.3),
    Stage(4096, 50, 0.0, 0.2, 0.3, 4.5),
)
FULL_MINUTES = 55.0


def scaled_stages(minutes: float) -> list[Stage]:
    """The curriculum with its step counts scaled to a nominal duration."""
    share = minutes / FULL_MINUTES
    return [Stage(**{**vars(stage), "steps": max(1, round(stage.steps * share))}) for stage in STAGES]
