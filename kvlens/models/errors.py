"""The one error of this room."""


class UnsupportedModel(ValueError):
    """The model cannot be run, with the reason and what to do."""
