"""The command line. Names and forms are a contract; bad input gives one sentence on stderr and exit status 1."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvlens import __version__
from kvlens.cli.bench import bench_app
from kvlens.cli.calibrate import calibrate_app
from kvlens.cli.explain import explain
from kvlens.cli.lens import pair, whatif
from kvlens.cli.report import report
from kvlens.cli.train import train_app
from kvlens.plaintext import json_text, terminal

app = typer.Typer(
    help="Run a language model under a KV-cache method, log every decision, replay it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
runs_app = typer.Typer(help="List, show, recover and delete runs.", invoke_without_command=True)
app.add_typer(runs_app, name="runs")
app.add_typer(train_app, name="train")
app.add_typer(calibrate_app, name="calibrate")
app.add_typer(bench_app, name="bench")
bench_app.command()(explain)
app.command()(report)
for command in (pair, whatif):
    app.command()(command)

out = Console(width=None if sys.stdout.isatty() else 240)
err = Console(stderr=True, soft_wrap=True)

RunsDir = Annotated[Path | None, typer.Option("--runs", help="Folder of the runs; default $KVLENS_RUNS, else ./runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def main() -> None:
    """Entry point: whatever is the user's to mend becomes one sentence and exit status 1."""
    from kvlens.store.errors import TraceError

    try:
        app()
    except ValidationError as error:
        first = error.errors()[0]
        _fail(f"{'.'.join(map(str, first['loc']))}: {first['msg']} (got {first['input']!r}).")
    except (ValueError, TraceError, OSError) as error:
        _fail(str(error))


def _fail(sentence: str) -> NoReturn:
    err.print(f"kvlens: {terminal(sentence)}", markup=False, highlight=False)
    raise SystemExit(1)


def runs_folder(given: Path | None) -> Path:
    """--runs, else $KVLENS_RUNS, else ./runs."""
    return given or Path(os.environ.get("KVLENS_RUNS") or "runs")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run a language model under a KV-cache method, log every decision, replay it."""


@app.command()
def run(
    prompt_file: Annotated[
        str, typer.Argument(help='UTF-8 text (.txt, .md), .json with a string "text", or - for standard input.')
    ],
    model: Annotated[str, typer.Option(help="'demo', a local folder or a hub id.")] = "demo",
    method: Annotated[str, typer.Option(help="See `kvlens methods`.")] = "sekv",
    preset: Annotated[str | None, typer.Option(help="A named set of the method's parameters.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Share of full KV (0.1, 10%), tokens (512tok) or bytes (64MB).")
    ] = None,
    max_new: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    answer: Annotated[str | None, typer.Option(help="What a right output's first line contains.")] = None,
    needle: Annotated[
        str | None, typer.Option(help="Words of the prompt that hold the answer; their tokens are marked.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of the method: name=value; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop when the output contains this text; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    trace_level: Annotated[str, typer.Option(help="summary, heads or spans: how much is logged.")] = "spans",
    coverage: Annotated[
        bool, typer.Option(help="Keep a copy of all keys, outside the budget, and log coverage.")
    ] = True,
    oracle: Annotated[
        str, typer.Option(help="Full attention by span: auto, off, all, or every=4,layers=0-3+7.")
    ] = "auto",
    against_full: Annotated[
        bool, typer.Option("--against-full", help="Log what each step lost against full KV.")
    ] = False,
    forced: Annotated[
        bool, typer.Option("--forced", help="Compare, and feed full KV's tokens, so that all steps compare.")
    ] = False,
    threads: Annotated[int, typer.Option(help="torch threads; 0: 1 for a small model, torch's choice otherwise.")] = 0,
    runs: RunsDir = None,
    progress_json: Annotated[
        bool, typer.Option("--progress-json", help="One JSON object per line on stdout instead of a bar.")
    ] = False,
) -> None:
    """Run a prompt under a method and store the trace. The last line of stdout is the run's uid."""
    from kvlens.cli.progress import Bar, JsonLines, stop_signals
    from kvlens.prompts import checked, decode, expecting
    from kvlens.runs.request import RunRequest, carry_out, parse_set

    reporter: Bar | JsonLines = JsonLines() if progress_json else Bar(err)
    cancelled = stop_signals()
    try:
        if prompt_file == "-":
            source = decode(sys.stdin.buffer.read(), "standard input")
        else:
            path = Path(prompt_file)
            if not path.is_file():
                raise ValueError(f"there is no prompt file '{prompt_file}'.")
            source = decode(path.read_bytes(), path.name)
        source = expecting(checked(source, prompt_file), answer, needle)
        request = RunRequest(
            model=model,
            method=method,
            preset=preset,
            budget=budget,
            max_new=max_new,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
            stop=tuple(stop or ()),
            overrides=parse_set(set_ or []),
            device=device,
            dtype=dtype,
            trace_level=trace_level,
            coverage=coverage,
            oracle=oracle,
            threads=threads,
            ignore_eos=ignore_eos,
            against=against_full or forced,
            forced_reference=forced,
        )
        uid, status, text = carry_out(request, source, runs_folder(runs), reporter.report, cancelled)
    except BaseException as error:
        reporter.failed(error)
        raise
    reporter.done(uid, status)
    if not progress_json:
        typer.echo(terminal(text) if sys.stdout.isatty() else text)
        typer.echo(uid)
    if status != "completed":
        _fail(f"the run was cancelled; what was recorded is stored as {uid}.")


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
    _table(columns, [[row[c] for c in columns] for _, row in frame.iterrows()])


@runs_app.command("show")
def runs_show(uid: str, runs: RunsDir = None, as_json: AsJson = False) -> None:
    """What a run is, what came out, and its self-check."""
    from kvlens.store.reader import TraceReader

    with TraceReader.open(runs_folder(runs), uid) as reader:
        meta, tokens, steps = reader.meta, reader.tokens(), reader.steps()
        checks = json.loads(reader.self_checks().to_json(orient="records"))
        generated = tokens[tokens["step"].notna()].sort_values("step")["text"]
        keys = (
            "model",
            "method",
            "preset",
            "config",
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
            "machine",
            "torch",
            "transformers",
            "kvlens",
        )
        shown: dict[str, Any] = {
            "uid": reader.uid,
            "status": reader.status,
            "error": reader.error,
            **{key: meta.get(key) for key in keys},
            "steps": reader.n_steps,
            "output_text": meta.get("output_text") or "".join(generated),
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


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method's parameters.")] = None, as_json: AsJson = False
) -> None:
    """The methods, or one method with its parameters."""
    from kvlens import methods as registered

    entries = (
        registered.catalogue()
        if name is None
        else [m for m in registered.catalogue() if m["name"] == registered.get(name).name]
    )
    if as_json:
        typer.echo(json.dumps(entries if name is None else entries[0], ensure_ascii=False))
    elif name is None:
        _table(
            ["name", "title", "what it does", "paper"],
            [[m["name"], m["title"], m["summary"], m["paper"]] for m in entries],
        )
    else:
        method = entries[0]
        typer.echo(f"{method['title']} ({method['name']}): {method['summary']}\n{method['paper']}")
        rows = [
            [p["name"], p["default"], p["symbol"], "ours" if p["ours"] else "paper", p["doc"]]
            for p in method["parameters"]
        ]
        _table(["parameter", "default", "symbol", "decided by", "meaning"], rows)
        for preset, values in method["presets"].items():
            typer.echo(f"preset {preset}: {' '.join(f'{k}={v}' for k, v in values.items()) or 'the defaults'}")


@app.command()
def prompt(
    task: Annotated[
        str,
        typer.Option(help="See `kvlens bench tasks`; the demo model can do needle, multikey, chain, note and list."),
    ] = "needle",
    length: Annotated[int, typer.Option(help="Tokens in all, of the model's tokenizer.")] = 2048,
    depth: Annotated[float, typer.Option(help="0 (start) to 1 (end): where the asked fact stands.")] = 0.5,
    seed: Annotated[int, typer.Option()] = 0,
    model: Annotated[str, typer.Option(help="Whose tokens are counted: 'demo', a local folder or a hub id.")] = "demo",
    to: Annotated[Path | None, typer.Option("--out", help="Write to this file instead of stdout.")] = None,
    as_json: AsJson = False,
) -> None:
    """Generate a prompt: its text on stdout; with --json also the answer and the needle's character ranges."""
    from kvlens import tasks
    from kvlens.tasks.encoding import encoding

    made = tasks.get(task).make(length, depth, seed, *encoding(model))
    fields = {
        "text": made.text,
        "answer": made.answer,
        "needle": made.needle,
        "task": made.task,
        "seed": made.seed,
        "length": made.length,
        "depth": made.depth,
    }
    written = json.dumps(fields, ensure_ascii=False) if as_json else made.text
    if to is None:
        typer.echo(written, nl=as_json)
    else:
        to.write_text(written, encoding="utf-8")


@app.command()
def export(
    uid: str,
    what: Annotated[
        str,
        typer.Option(
            help="heads, head-steps, spans, span-mass, transfers, events, tokens, journal, scores, loss, oracle, "
            "span-keys, "
            "chrome-trace"
        ),
    ] = "heads",
    fmt: Annotated[str, typer.Option("--format", help="csv, parquet or json; of chrome-trace json.")] = "csv",
    to: Annotated[Path | None, typer.Option("--out", help="File to write; default stdout.")] = None,
    runs: RunsDir = None,
) -> None:
    """Export a table of a run, column names say their units; or its timeline for Perfetto (chrome-trace)."""
    from kvlens.store.export import export as write
    from kvlens.store.reader import TraceReader

    with TraceReader.open(runs_folder(runs), uid) as reader:
        write(reader, what, fmt, sys.stdout.buffer if to is None else to)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Versions, devices, and the self-checks of a short run: pass or fail each."""
    from kvlens.cli.doctor import examine

    report = examine()
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
    else:
        for name, value in report["facts"].items():
            typer.echo(f"{name:16} {value}")
        for check in report["checks"]:
            typer.echo(f"{'pass' if check['passed'] else 'FAIL'}  {check['name']}: {check['detail']}")
    if not all(check["passed"] for check in report["checks"]):
        raise typer.Exit(1)


def _table(columns: list[str], rows: list[list[Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column in ("uid", "name", "parameter", "status"))
    for row in rows:
        table.add_row(*(Text("" if v is None or v != v else terminal(v).replace("\n", " ")[:160]) for v in row))
    out.print(table)
