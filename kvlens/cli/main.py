"""The command line. Names and forms are a contract; bad input gives one sentence on stderr and exit status 1."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlens import __version__
from kvlens.cli.check_method import check_method
from kvlens.cli.diagnose import diagnose
from kvlens.cli.failing import FLAG, run_command
from kvlens.cli.gate import gate
from kvlens.cli.ledger import ledger
from kvlens.cli.lens import pair, whatif
from kvlens.cli.methods import methods
from kvlens.cli.models import models_app
from kvlens.cli.options import DEFAULT_MODEL, AsJson, RunsDir, runs_folder, writable
from kvlens.cli.race import race
from kvlens.cli.run import run
from kvlens.cli.runs import runs_app
from kvlens.cli.segments import runs_segments
from kvlens.cli.studies import studies_app
from kvlens.cli.study import study
from kvlens.cli.tip import tip
from kvlens.cli.trace import check_trace, export_folder, import_trace
from kvlens.files import naming
from kvlens.models.find import DEMO
from kvlens.storeys import offered

app = typer.Typer(
    help="Run a language model under a KV-cache method, log every decision, replay it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
runs_app.command("segments")(runs_segments)
app.add_typer(runs_app, name="runs")
app.add_typer(models_app, name="models")
app.add_typer(studies_app, name="studies")
for command in (run, race, study, gate, pair, whatif, tip, ledger, diagnose, methods, check_method, check_trace):
    app.command()(command)
app.command("import")(import_trace)
for storey in offered("commands"):
    storey.register(app)


def main() -> None:
    """Entry point: every error becomes one sentence and exit status 1."""
    from kvlens import hangs
    from kvlens.methods.faults import hangs as hook_hangs

    hangs.end_process(hook_hangs)
    run_command(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(FLAG, help="Print where an error was raised; may also be put behind the command's options.")
    ] = False,
) -> None:
    """Run a language model under a KV-cache method, log every decision, replay it."""


@app.command()
def prompt(
    task: Annotated[
        str,
        typer.Option(
            help="See `kvlens bench tasks`; the demo model can do needle, multikey, chain, note and list. "
            "Default: needle for it, niah_single for every other."
        ),
    ] = "",
    length: Annotated[int, typer.Option(help="Tokens in all, of the model's tokenizer.")] = 2048,
    depth: Annotated[float, typer.Option(help="0 (start) to 1 (end): where the asked fact stands.")] = 0.5,
    seed: Annotated[int, typer.Option()] = 0,
    model: Annotated[str, typer.Option(help="Whose tokens are counted, as for `kvlens run`.")] = DEFAULT_MODEL,
    chat: Annotated[str, typer.Option(help="As for `kvlens run`: in which form the prompt will be fed.")] = "auto",
    to: Annotated[Path | None, typer.Option("--out", help="Write to this file instead of stdout.")] = None,
    as_json: AsJson = False,
) -> None:
    """Generate a prompt: its text on stdout; with --json also the answer and the needle's character ranges."""
    from kvlens import tasks
    from kvlens.tasks.encoding import encoding

    writable(to)
    generator = tasks.get(task or ("needle" if model == DEMO else "niah_single"))
    source = tasks.ask(generator, length, depth, seed, encoding(model, chat))
    fields = {
        "text": source.text,
        "answer": source.answer,
        "needle": source.needle,
        "task": source.task,
        "seed": source.seed,
        "length": source.length,
        "depth": source.depth,
    }
    if source.opening:
        fields["answer_prefix"] = source.opening
    written = json.dumps(fields, ensure_ascii=False) if as_json else source.text
    if to is None:
        typer.echo(written, nl=as_json)
    else:
        with naming(to):
            to.write_text(written, encoding="utf-8")


@app.command()
def export(
    uids: Annotated[list[str] | None, typer.Argument(metavar="UID", help="One run or several.")] = None,
    what: Annotated[
        str,
        typer.Option(
            help="outcome, heads, head-steps, kv-steps, steps, spans, span-mass, decisions, transfers, events, tokens, "
            "journal, cuts, scores, loss, oracle, lost-tokens, effects, missed, readers, span-keys, phases, meta, "
            "chrome-trace; trace: one run in the open format, into the folder --out; "
            "or dictionary: every column of these tables with its unit, denominator and meaning, without a run"
        ),
    ] = "heads",
    fmt: Annotated[
        str | None,
        typer.Option("--format", help="csv, parquet or json; of chrome-trace json. Default: as --out ends, else csv."),
    ] = None,
    to: Annotated[Path | None, typer.Option("--out", help="File to write; default stdout.")] = None,
    with_run: Annotated[
        bool | None,
        typer.Option(
            "--run-columns/--no-run-columns",
            help="Begin each row with its run's model, method, parameters, budget, prompt, seed and outcome. "
            "Default: if there are several runs.",
        ),
    ] = None,
    runs: RunsDir = None,
) -> None:
    """Export a table of one run or of several, column names say their units; or a run's timeline for Perfetto
    (chrome-trace)."""
    from kvlens.store.export import FORMATS, TIMELINE
    from kvlens.tables.dictionary import dictionary
    from kvlens.tables.manyruns import export_frame, export_runs
    from kvlens.text.outfile import format_of

    file = None if what == "trace" else to  # the trace's --out is a folder
    form = format_of(file, fmt, ("json",) if what == TIMELINE else FORMATS)
    writable(to)
    out = sys.stdout.buffer if to is None else to
    if what == "dictionary":
        export_frame(dictionary(), form, out)
        return
    if not uids:
        raise typer.BadParameter("Name at least one run; `kvlens runs` lists them.")
    if what == "trace":
        export_folder(uids, runs_folder(runs), to)
        return
    export_runs(uids, runs_folder(runs), what, form, out, with_run)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Compare this model's full KV with its own generate, and keep the verdict.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print versions and devices, then the checks of a short run: pass or fail each. Exit status 1 if one failed."""
    from kvlens.cli.doctor import examine, examine_model

    if not (examine(as_json) if model is None else examine_model(model, as_json)):
        raise typer.Exit(1)
