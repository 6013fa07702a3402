"""The open trace format: a trace that another engine wrote, checked and stored as a run (docs/trace-format.md).

`Writer` writes traces. Its file, writer.py, imports nothing of kvlens and can be copied into an engine.
"""

from kvlens.trace.writer import Writer

__all__ = ["Writer"]
