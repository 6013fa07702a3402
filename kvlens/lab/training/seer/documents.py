"""What the gate is trained on: given texts, or the book and code that SeKV's router is trained on, or rows of the demo
language for the demo model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlens.engine.models import LoadedModel

DEMO_ROWS = 40
"""generated documents for the demo model"""


def list_documents(
    loaded: LoadedModel, books: Sequence[tuple[str, str]]
) -> tuple[Sequence[str | Sequence[int]], dict[str, Any]]:
    """Return the documents and what they are, for the provenance. books: name and text of each given file."""
    if books:
        return [text for _, text in books], {"documents": [name for name, _ in books]}
    if loaded.name == "demo":
        from kvlens.lab.training.demo import english
        from kvlens.lab.training.demo.rows import RowMaker
        from kvlens.lab.training.demo.tokenizer import Encoder
        from kvlens.lab.training.sekv.demo import documents as demo_rows

        maker = RowMaker(Encoder(loaded.tokenizer), english.split(english.collect())[0])
        return demo_rows(maker, DEMO_ROWS), {"documents": "rows of the demo language with questions, and real English"}
    from kvlens.lab.training.sekv import corpus

    return corpus.documents(), {"documents": corpus.named()}
