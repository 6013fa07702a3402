"""The embedded demo model: a small Llama trained from scratch by one command, with its tasks, tokenizer and
evaluation."""

from pathlib import Path

__all__ = ["demo_path"]


def demo_path() -> Path:
    """Folder with the demo model's config, fp16 weights, tokenizer and provenance (readable by transformers)."""
    return Path(__file__).resolve().parent / "weights"
