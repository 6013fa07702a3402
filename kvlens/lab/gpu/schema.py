"""The result file as a pydantic schema, for whoever reads it (pages, docs, tests)."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from kvlens.lab.results.gpu import Result
from kvlens.text.fieldrules import rule_of

SCHEMA: TypeAdapter[Result] = TypeAdapter(Result)


def read(path: Path) -> Result:
    """A checked result. Raises ValueError with one sentence when the file is not one."""
    try:
        return SCHEMA.validate_json(path.read_bytes())
    except ValidationError as error:
        issue = error.errors()[0]
        where = ".".join(str(part) for part in issue["loc"]) or "the file"
        raise ValueError(
            f"the result file '{path.name}' does not hold a GPU result ({where} {rule_of(issue)}); measure it again."
        ) from None


def list_files(folder: Path) -> list[Path]:
    """Files of GPU results in a folder, dry runs among them, by name."""
    return sorted(folder.glob("gpu-*.json"))
