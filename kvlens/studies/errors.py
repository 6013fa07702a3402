"""What can be wrong with a study, one sentence with a code."""

from __future__ import annotations

from collections.abc import Sequence


class BadStudy(ValueError):
    """A study that cannot be planned, or a part of one that it does not have."""

    def __init__(self, code: str, sentence: str, faults: Sequence[str] = ()) -> None:
        """faults: the keys of a study file that are at fault."""
        super().__init__(sentence)
        self.faults = tuple(faults)
        self.code = code
        """no_method, no_values, foreign_parameter, bad_values, unknown_figure, unknown_axis, unknown_arm,
        bad_plan_file, no_threshold, too_few_prompts, model_changed, model_is_object, other_methods, no_paper,
        unknown_prompt, no_reference or cut_is_stored"""
