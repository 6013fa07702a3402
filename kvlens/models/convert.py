"""A GGUF file as a folder that transformers loads: config, tokenizer, weights, and where they came from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvlens.files import RefusedFile, check_ordinary
from kvlens.models.cache import Told
from kvlens.models.errors import UnsupportedModel
from kvlens.models.gguf import config_of, plan_weights, values
from kvlens.models.ggufheader import read_header
from kvlens.models.ggufvocab import settings_of, tokenizer_of
from kvlens.models.tensorfile import total_bytes, write_tensors

PROVENANCE = "kvlens.json"
"""beside the weights: what file they were made of"""


def convert(
    path: Path, folder: Path, report: Told, sha256: str | None = None, about: dict[str, Any] | None = None
) -> None:
    """Write a GGUF file as config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    model.safetensors into an empty folder. sha256: what the file must be. about: more for its provenance.

    Raises UnsupportedModel with one sentence for a file that is damaged, of another hash or of an unknown family.
    """
    name = path.name
    report("convert", 0, 1)
    sha = _sha256(path)
    if sha256 is not None and sha != sha256:
        raise UnsupportedModel(
            f"'{path}' is not the file it should be (SHA-256 {sha[:12]}…, expected {sha256[:12]}…): install it again.",
            code="wrong_hash",
        )
    header = read_header(path)
    try:
        config = config_of(header, name, path)
        planned = plan_weights(header, name)
        tokenizer = tokenizer_of(header, name)
    except (TypeError, AttributeError, OverflowError, IndexError) as error:
        raise UnsupportedModel(
            f"'{name}' has fields of other kinds than GGUF's ({type(error).__name__}): convert the model again."
        ) from error
    entries = [entry for _, entry in planned]
    whole = total_bytes(entries)
    write_tensors(
        folder / "model.safetensors",
        entries,
        values(header, path, name, planned),
        lambda count: report("convert", count >> 20, whole >> 20),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fields = header.fields
    provenance = {
        "source": str(path.resolve()),
        "sha256": sha,
        "licence": fields.get("general.license"),
        "title": fields.get("general.name"),
        "architecture": fields["general.architecture"],
        **(about or {}),
    }
    context = config["max_position_embeddings"]
    for file, content in (
        ("generation_config.json", ends),
        ("tokenizer_config.json", settings_of(header, context)),
        (PROVENANCE, provenance),
        ("config.json", config),
    ):
        (folder / file).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    try:
        check_ordinary(path)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UnsupportedModel(f"'{path}' cannot be read: {error.strerror}.") from None
    except RefusedFile as error:
        raise UnsupportedModel(str(error)) from None
