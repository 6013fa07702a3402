"""kvlens: run a language model under a KV-cache method, log every decision, replay it token by token."""

import os
from pathlib import Path

__version__ = "0.2.0"

# A torch thread that waits for the others spins, by default longer than a kernel of a small model takes. On a machine
# that has anything else to do, that is where the time goes: a run of two threads beside one busy process took eight
# times as long. Read when torch is loaded; what the user says holds.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

PACKAGE = Path(__file__).resolve().parent
"""The folder of this package. `kernels` and `store` in it are links to the repository's folders of those names."""
