"""The one error of this room."""

from kvlens.refusal import Refusal


class UnsupportedModel(Refusal):
    """The model cannot be run, with the reason and what to do."""
