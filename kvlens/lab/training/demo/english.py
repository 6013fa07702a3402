"""Real English that is free and on every machine: the Python standard library's documentation.

Taken are pydoc's topics, the docstrings of every module of the standard library (read with `ast`, nothing is imported)
and, where they exist, the licence texts under /usr/share/common-licenses. A document is one file (or one topic); every
HELD_OUT_EVERY-th document by a hash of its name is never trained on and serves to measure surprisal.
"""

import ast
import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_EVERY = 12
SKIP_FOLDERS = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "turtledemo",
    "ensurepip",
}


@dataclass(frozen=True)
class Document:
    """Prose paragraphs of one file or topic."""

    name: str
    paragraphs: tuple[str, ...]

    @property
    def held_out(self) -> bool:
        """True when the document is kept for evaluation."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % HELD_OUT_EVERY == 0


def _is_prose(paragraph: str) -> bool:
    words = paragraph.split()
    if len(words) < 8 or any(mark in paragraph for mark in (">>>", "...", "::=", "|  ", "==", "--|", "    ")):
        return False
    letters = sum(char.isalpha() or char in " \n,.;'" for char in paragraph)
    return letters / len(paragraph) > 0.9 and paragraph.isascii()


def paragraphs(text: str) -> tuple[str, ...]:
    """The prose paragraphs of a text, line breaks kept, indentation, code, tables and lists dropped."""
    rows = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.strip().splitlines()]
        block = re.sub(r"[ \t]+", " ", "\n".join(lines)).replace("*", "").replace('"', "").replace("`", "")
        if _is_prose(block):
            rows.append(block)
    return tuple(rows)


def _docstrings(source: str) -> str:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))


def collect() -> list[Document]:
    """All documents, in a fixed order, each paragraph once (duplicates between files stay with the first file)."""
    raw: list[tuple[str, str]] = []
    library = Path(sysconfig.get_paths()["stdlib"])
    try:
        from pydoc_data.topics import topics

        raw += [(f"pydoc topic {name}", text) for name, text in sorted(topics.items())]
    except ImportError:
        pass
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if not SKIP_FOLDERS & set(inside.parts) and inside.parts[0] != "pydoc_data":
            raw.append((f"stdlib {inside.as_posix()}", _docstrings(path.read_text("utf-8", "replace"))))
    licences = Path("/usr/share/common-licenses")
    if licences.is_dir():
        raw += [
            (f"licence {p.name}", p.read_text("utf-8", "replace"))
            for p in sorted(licences.iterdir())
            if not p.is_symlink()
        ]
    seen_keys: set[str] = set()
    documents = []
    for name, text in raw:
        fresh = []
        for paragraph in paragraphs(text):
            flat = " ".join(paragraph.split())
            if flat not in seen_keys:
                seen_keys.add(flat)
                fresh.append(paragraph)
        if fresh:
            documents.append(Document(name, tuple(fresh)))
    return documents


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Training documents and held-out documents."""
    return [d for d in documents if not d.held_out], [d for d in documents if d.held_out]
