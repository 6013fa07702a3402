"""The embedded demo model: a small Llama trained from scratch by one command, with its tasks, tokenizer and
evaluation."""

from pathlib import Path

__all__ = ["DEMO_FOLDER", "demo_path"]

DEMO_FOLDER = Path(__file__).resolve().parent / "weights"
"""holds the demo model's config, fp16 weights, tokenizer and provenance (readable by transformers)"""


def demo_path() -> Path:
    """Return DEMO_FOLDER."""
    return DEMO_FOLDER
