"""kvlens: run a language model under a KV-cache method, log every decision, replay it token by token."""

import os
from pathlib import Path

__version__ = "0.1.0"

# A torch thread that waits for the others spins, by default longer than a kernel of a small model takes. On a machine
# that has anything else to do, that is where the time goes: a run of two threads beside one busy process took eight
# times as long. Read when torch is loaded; what the user says holds.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The folders kernels/ and store/ stand beside this package but are imported as kvlens.kernels and kvlens.store: a
# top-level package named `kernels` would shadow the distribution of that name which transformers imports when it is
# installed.
REPOSITORY = Path(__file__).resolve().parent.parent
"""Where kernels/, store/ and benchmarks/ stand beside this package."""
__path__.append(str(REPOSITORY))
