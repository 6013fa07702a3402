"""kvlens: run a language model under a KV-cache method, log every decision, replay it token by token."""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlens.api import (
        Interrupted,
        KvlensError,
        MachineError,
        ModelError,
        Race,
        RequestError,
        Run,
        RunError,
        Study,
        Verdict,
        export_trace,
        import_trace,
        load_model,
        observe,
        open,
        race,
        retrieval_heads,
        run,
        runs,
        sample,
        studies,
        study,
        table,
    )
    from kvlens.api.methodspackage import methods

__version__ = "0.2.0"

# A torch thread that waits for the others spins, by default longer than a kernel of a small model takes. On a machine
# that has anything else to do, that is where the time goes: a run of two threads beside one busy process took eight
# times as long. Read when torch is loaded; what the user says holds.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

PACKAGE = Path(__file__).resolve().parent
"""The folder of this package. `kernels` and `store` in it are links to the repository's folders of those names."""

_API = (
    "Interrupted",
    "KvlensError",
    "MachineError",
    "ModelError",
    "Race",
    "RequestError",
    "Run",
    "RunError",
    "Study",
    "Verdict",
    "export_trace",
    "import_trace",
    "load_model",
    "observe",
    "open",
    "race",
    "retrieval_heads",
    "run",
    "sample",
    "study",
    "table",
)
"""names of kvlens.api, imported when they are first used"""
_CALLED = ("methods", "runs", "studies")
"""packages that are functions of the API too (kvlens.callpackage)"""

__all__ = [
    "PACKAGE",
    "Interrupted",
    "KvlensError",
    "MachineError",
    "ModelError",
    "Race",
    "RequestError",
    "Run",
    "RunError",
    "Study",
    "Verdict",
    "__version__",
    "export_trace",
    "import_trace",
    "load_model",
    "methods",
    "observe",
    "open",
    "race",
    "retrieval_heads",
    "run",
    "runs",
    "sample",
    "studies",
    "study",
    "table",
]


def __getattr__(name: str) -> Any:
    """Import a name of the API, or a package that is a function too, when it is first used (PEP 562)."""
    if name in _API:
        return getattr(import_module("kvlens.api"), name)
    if name in _CALLED:
        return import_module(f"kvlens.{name}")
    raise AttributeError(f"module 'kvlens' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API, *_CALLED})
