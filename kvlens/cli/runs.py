"""`kvlens runs`: the stored runs."""

from __future__ import annotations

import json
from typing import Any

import typer

from kvlens.cli.options import AsJson, RunsDir, err, runs_folder, show_table
from kvlens.text.plaintext import json_text, terminal

runs_app = typer.Typer(help="List, show, recover and delete runs.", invoke_without_command=True)


@runs_app.callback()
def runs_top(context: typer.Context, runs: RunsDir = None, as_json: AsJson = False) -> None:
    """Without a command: list the runs."""
    if context.invoked_subcommand is None:
        runs_list(runs, as_json)


@runs_app.command("list")
def runs_list(runs: RunsDir = None, as_json: AsJson = False) -> None:
    """All runs of the folder, newest first."""
    from kvlens.store.reader import list_runs

    frame = list_runs(runs_folder(runs))
    if as_json:
        typer.echo(frame.to_json(orient="records"))
        return
    if frame.empty:
        typer.echo(f"no runs in {runs_folder(runs)}; start one with: kvlens run PROMPT_FILE")
        return
    columns = ["uid", "status", "model", "method", "preset", "budget", "prompt_tokens", "steps", "output_text"]
    # a forced run did not write its tokens
    frame["output_text"] = frame["output_text"].where(
        ~frame["forced"].fillna(value=False).astype(bool), "(fed) " + frame["output_text"]
    )
    show_table(columns, [[row[c] for c in columns] for _, row in frame.iterrows()])


@runs_app.command("show")
def runs_show(uid: str, runs: RunsDir = None, as_json: AsJson = False) -> None:
    """What a run is, what came out, and its self-check."""
    from kvlens.lens.severity import outcome
    from kvlens.store.reader import TraceReader

    with TraceReader.open(runs_folder(runs), uid) as reader:
        meta, tokens, steps, came = reader.meta, reader.tokens(), reader.steps(), outcome(reader)
        checks = json.loads(reader.self_checks().to_json(orient="records"))
        generated = tokens[tokens["step"] >= meta.asked_steps].sort_values("step")["text"]
        keys = (
            "model",
            "method",
            "preset",
            "config",
            "fit",
            "own_decisions",
            "budget",
            "budget_bytes",
            "full_kv_bytes",
            "prompt_tokens",
            "max_new",
            "temperature",
            "top_p",
            "seed",
            "forced",
            "reference",
            "parent",
            "device",
            "dtype",
            "task",
            "answer",
            "question",
            "question_tokens",
            "machine",
            "torch",
            "transformers",
            "kvlens",
        )
        shown: dict[str, Any] = {
            "uid": reader.uid,
            "status": reader.status,
            "error": reader.error,
            **meta.pick(keys),
            "steps": reader.n_steps,
            "output_text": meta.output_text or "".join(generated),
            "outcome": came.words or None,
            "left_full_kv_at_step": came.lost_at,
            "peak_bytes": None if steps.empty else int(steps["peak_bytes"].max()),
            "self_check": checks,
        }
    if as_json:
        typer.echo(json_text(shown))
        return
    for key, value in shown.items():
        if key != "self_check":
            typer.echo(f"{key:15} {terminal(value, 16)}")
    for check in checks:
        said = terminal(f"{check['name']}: {check['detail']}", 22)
        typer.echo(f"self-check      {'pass' if check['passed'] else 'FAIL'}  {said}")


@runs_app.command("recover")
def runs_recover(uid: str, runs: RunsDir = None) -> None:
    """Make an interrupted run complete up to its last written step."""
    from kvlens.store.recover import recover

    made = recover(runs_folder(runs), uid)
    typer.echo(f"{uid}: recovered; {made.steps} steps are readable")
    if made.lost is not None:
        err.print(f"kvlens: {terminal(made.lost)}", markup=False, highlight=False)


@runs_app.command("delete")
def runs_delete(uid: str, runs: RunsDir = None) -> None:
    """Delete a run's folder. A run that is being written is refused."""
    from kvlens.store.recover import delete_run

    delete_run(runs_folder(runs), uid)
    typer.echo(f"{uid}: deleted")
