"""Where the model of a run comes from: loaded by its name, or handed in by a caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvlens.runs.request import Report, RunRequest

if TYPE_CHECKING:
    from kvlens.engine.models import LoadedModel


class ModelSource(Protocol):
    """Supplies the loaded model of a request."""

    @property
    def named(self) -> bool:
        """True: the request's model is a name with files on this machine. False: a caller handed in the object."""
        ...

    def load(self, request: RunRequest, report: Report) -> LoadedModel:
        """Return the model, ready to run. Raises UnsupportedModel with one sentence."""
        ...


class ByName:
    """Loads the model of every request from the files that its name stands for."""

    named = True

    def load(self, request: RunRequest, report: Report) -> LoadedModel:
        """See ModelSource."""
        from kvlens.engine.models import load

        return load(request.model, request.device, request.dtype, report)


BY_NAME: ModelSource = ByName()
