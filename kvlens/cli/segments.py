"""`kvlens runs segments`: what became of the named parts of a prompt."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvlens.cli.options import AsJson, RunsDir, runs_folder, show_table
from kvlens.text.plaintext import json_text, terminal


def runs_segments(
    uid: str,
    segment: Annotated[
        list[str] | None,
        typer.Option(help="NAME=MARKER or NAME=START:END, in place of the recorded parts; may be repeated."),
    ] = None,
    runs: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """What became of the named parts of a run's prompt: kept and evicted tokens, attention, effect."""
    from kvlens.lens.instructions import followed_instructions
    from kvlens.lens.segments import eviction_sentences, segment_table
    from kvlens.store.reader import TraceReader
    from kvlens.text.segments import pairs_of

    with TraceReader.open(runs_folder(runs), uid) as reader:
        table, method = segment_table(reader, dict(pairs_of(segment or ()))), str(reader.meta.method)
        instructions = followed_instructions(reader.meta)
    if as_json:
        typer.echo(json_text(table.to_dict("records")))
        return
    if table.empty:
        typer.echo("The run names no part of its prompt: give --segment NAME=MARKER.")
        return
    show_table(list(table.columns), [[_figure(value) for value in row] for row in table.itertuples(index=False)])
    for sentence in (*eviction_sentences(table, method), *(each.sentence for each in instructions)):
        typer.echo(terminal(sentence))


def _figure(value: Any) -> Any:
    return f"{value:.3f}" if isinstance(value, float) and value == value else value
