"""kvlens: run a language model under a KV-cache method, log every decision, replay it token by token."""

from pathlib import Path

__version__ = "0.1.0"

# The folders kernels/ and store/ stand beside this package but are imported as kvlens.kernels and kvlens.store: a
# top-level package named `kernels` would shadow the distribution of that name which transformers imports when it is
# installed.
REPOSITORY = Path(__file__).resolve().parent.parent
"""Where kernels/, store/ and benchmarks/ stand beside this package."""
__path__.append(str(REPOSITORY))
