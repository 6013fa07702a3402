"""trace.json of the open format, typed. kvlens/trace/trace.schema.json is its JSON schema, made by this module.

Usage: python -m kvlens.trace.head --write kvlens/trace/trace.schema.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError, model_validator

from kvlens.files import read_plain
from kvlens.metaparts import Sampled
from kvlens.store.attach import MOST_STEPS, read_value
from kvlens.store.columnrules import MOST_INTEGER, MOST_META
from kvlens.trace.columns import FORMAT, VERSION
from kvlens.trace.faults import BadTrace, Fault, quote

NAME = "trace.json"
Count = Annotated[StrictInt, Field(ge=0, le=MOST_INTEGER)]
Heads = Annotated[StrictInt, Field(ge=1, le=256)]
Line = Annotated[str, Field(max_length=300)]
Text = Annotated[str, Field(max_length=MOST_META)]


class Head(BaseModel):
    """What a trace records of itself. Other keys are allowed and ignored. null: not recorded."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")

    format: Literal["kvlens-trace"]
    version: StrictInt = Field(ge=1, le=VERSION, description="version of the format")
    engine: Line = Field(min_length=1, description="name and version of what wrote the trace")
    layers: Heads = Field(description="layers of the model")
    q_heads: Heads = Field(description="query heads per layer")
    kv_heads: Heads = Field(description="KV heads per layer, a divisor of q_heads")
    steps: Annotated[StrictInt, Field(ge=0, le=MOST_STEPS)] = Field(description="committed decode steps")
    complete: StrictBool = Field(description="true: the run came to its end")
    tables: dict[Line, list[Line]] = Field({}, description="table -> its Parquet files, in order")
    database: Line | None = Field(None, description="one DuckDB file that holds the tables, in place of `tables`")
    model: Line | None = Field(None, description="name of the model")
    method: Line | None = Field(None, description="name of the cache method")
    parameters: dict[str, Any] = Field({}, description="the method's parameters")
    budget: Line | None = Field(None, description="the budget as requested, such as 20%")
    budget_bytes: Count | None = Field(None, description="the budget in bytes; null: no limit")
    head_dim: Count | None = Field(None, description="size of one head")
    token_bytes: Count | None = Field(None, description="bytes of one token's keys and values in all layers")
    full_kv_bytes: Count | None = Field(None, description="bytes of the full KV cache at the end of the run")
    dtype: Line | None = Field(None, description="number format of keys and values")
    device: Line | None = Field(None, description="cpu, cuda, ...")
    link: Line | None = Field(None, description="what copies between device and host go through")
    created: Line | None = Field(None, description="UTC, ISO 8601")
    prompt_text: Text | None = Field(None, description="the prompt; null: the texts of its tokens, joined")
    task: Line | None = Field(None, description="name of the task")
    answer: Text | None = Field(None, description="what a right output contains")
    answers: tuple[Line, ...] = Field((), description="other right answers")
    needle: tuple[tuple[Count, Count], ...] = Field((), description="character ranges [start, end) of the prompt")
    question_tokens: Count | None = Field(None, description="first steps that feed a question and choose nothing")
    max_new: Count | None = Field(None, description="new tokens at most")
    seed: StrictInt | None = Field(None, ge=-MOST_INTEGER, le=MOST_INTEGER, description="of sampling")
    temperature: float | None = Field(None, allow_inf_nan=False, description="0: greedy")
    forced: StrictBool | None = Field(None, description="true: the run was fed full KV's tokens")
    output_text: Text | None = Field(None, description="the output; null: the texts of the steps' tokens, joined")
    stopped: Line | None = Field(None, description="why the output ended: eos, stop, length or forced")
    reference_output: Text | None = Field(None, description="the output of full KV")
    full_attention: Sampled | None = Field(
        None, description="steps (every n-th) and layers (empty: all) of the table oracle; null: read from the table"
    )
    effect_steps: tuple[Count, ...] = Field(
        (), description="lost steps over which the table effect adds; empty: its own step alone"
    )
    prefill_us: Count | None = Field(None, description="time of the prefill, µs")
    prefill_peak_bytes: Count | None = Field(None, description="most KV bytes on the device during the prefill")
    prefill_cold_bytes: Count | None = Field(None, description="KV bytes in host memory after it")
    prefill_resident_bytes: Count | None = Field(None, description="KV bytes on the device after it")

    @model_validator(mode="after")
    def _sizes_fit(self) -> Head:
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads is no multiple of kv_heads ({self.q_heads}, {self.kv_heads})")
        if bool(self.tables) == (self.database is not None):
            raise ValueError("name the files of the tables in `tables`, or one file in `database`")
        if self.budget is not None and self.budget_bytes is None:
            raise ValueError("`budget` needs `budget_bytes`, what it comes to")
        if any(end < start for start, end in self.needle):
            raise ValueError("a range of `needle` ends before its start")
        return self


def read_head(folder: Path) -> Head:
    """Read trace.json of a folder. Raises BadTrace."""
    try:
        text = read_plain(folder / NAME).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise BadTrace([Fault("trace_missing", file=NAME)]) from None
    except (OSError, ValueError) as error:
        raise BadTrace([Fault("head_invalid", file=NAME, value=quote(str(error)))]) from None
    try:
        values = read_value(text)
    except (ValueError, RecursionError) as error:
        raise BadTrace([Fault("head_invalid", file=NAME, rule="JSON", value=quote(str(error)))]) from None
    version = values.get("version") if isinstance(values, dict) else None
    if isinstance(version, int) and version > VERSION and values.get("format") == FORMAT:
        raise BadTrace(
            [Fault("trace_too_new", file=NAME, column="version", rule=f"1 to {VERSION}", value=str(version))]
        )
    try:
        return Head.model_validate(values)
    except ValidationError as error:
        faults = [
            Fault(
                "head_invalid",
                None,
                ".".join(map(str, each["loc"])) or None,
                NAME,
                None,
                each["msg"],
                quote(each["input"]),
            )
            for each in error.errors()[:20]
        ]
        raise BadTrace(faults) from None


def schema() -> dict[str, Any]:
    """Return the JSON schema of trace.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Head.model_json_schema()}


def schema_text() -> str:
    """Return the text of trace.schema.json."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the JSON schema."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True)
    parser.parse_args().write.write_text(schema_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
