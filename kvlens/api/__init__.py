"""The Python API: run a prompt, read what was recorded, repeat it with something changed (docs/api.md).

`import kvlens` offers the names of this package; each is imported when it is first used.
"""

from kvlens.api.catalogue import methods, retrieval_heads, runs, sample, table
from kvlens.api.errors import Interrupted, KvlensError, MachineError, ModelError, RequestError, RunError
from kvlens.api.models import load_model
from kvlens.api.observing import observe
from kvlens.api.racing import Race, race
from kvlens.api.running import open_run as open
from kvlens.api.running import run
from kvlens.api.storedrun import Run
from kvlens.api.storedstudy import Study
from kvlens.api.studying import studies, study
from kvlens.api.tracing import export_trace, import_trace
from kvlens.api.verdict import Verdict

__all__ = [
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
