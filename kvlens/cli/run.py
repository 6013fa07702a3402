"""`kvlens run`: a prompt under a method, stored as a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvlens.cli.options import DEFAULT_MODEL, Device, Model, ProgressJson, RunsDir, err, fail, runs_folder
from kvlens.cli.prompting import ChatArg, Segment, conversation_in, system_of
from kvlens.methods import DEFAULT
from kvlens.methods.faults import stray
from kvlens.runs.request import AUTO, READ_AHEAD
from kvlens.text.plaintext import terminal


def run(
    prompt_file: Annotated[
        str,
        typer.Argument(
            help='UTF-8 text (.txt, .md), .json with a string "text" or chat "messages", or - for standard input.'
        ),
    ],
    model: Model = DEFAULT_MODEL,
    method: Annotated[str, typer.Option(help="See `kvlens methods`.")] = DEFAULT,
    preset: Annotated[
        str | None,
        typer.Option(
            help="A named set of the method's parameters, or fit: computed for this prompt and budget. Default: the "
            "paper's numbers, fit where they do not fit."
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Share of full KV in --dtype (0.1, 10%; 100%: no limit), tokens (512tok), bytes (64MB) or auto: 20%, "
            "or the least that the method can hold for this prompt."
        ),
    ] = AUTO,
    max_new: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    answer: Annotated[str | None, typer.Option(help="What a right output contains.")] = None,
    needle: Annotated[
        str | None, typer.Option(help="Words of the prompt that hold the answer; their tokens are marked.")
    ] = None,
    segment: Segment = None,
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
    chat: Annotated[
        str, typer.Option(help="auto, on or off: feed the prompt in the model's chat form; auto: where it has one.")
    ] = "auto",
    system: Annotated[str | None, typer.Option(help="The chat form's system message.")] = None,
    chat_arg: ChatArg = None,
    question: Annotated[
        str,
        typer.Option(
            help="in or after: read and place the question with its context, or feed it once the context is placed."
        ),
    ] = "in",
    ask: Annotated[
        list[str] | None,
        typer.Option(
            help="A question about the prompt file's text, which is then its context. Given several times with "
            "--question after: a run each, on a context that is read once and placed alike."
        ),
    ] = None,
    turns: Annotated[
        str | None,
        typer.Option(
            help="Of chat messages with several turns, carried: the first is placed, the others are fed to its cache; "
            "or anew: the history is read anew. User messages without a reply are then run turn by turn."
        ),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    trace_level: Annotated[str, typer.Option(help="summary, heads or spans: how much is logged.")] = "spans",
    coverage: Annotated[bool, typer.Option(help="Keep all keys, outside the budget, and log coverage.")] = True,
    phases: Annotated[bool, typer.Option(help="Time the phases of every step, on a CPU.")] = True,
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
    progress_json: ProgressJson = False,
    ahead: Annotated[bool, typer.Option(READ_AHEAD, hidden=True, help="Read the prompt for a later run only.")] = False,
) -> None:
    """Run a prompt under a method and store the trace. The last line of stdout is the run's uid; of several questions,
    the last lines are, one each."""
    from kvlens.cli.progress import Bar, JsonLines, reserve_stdout
    from kvlens.runs.carrying import carry_out, carry_out_each
    from kvlens.runs.conversing import answer_turns
    from kvlens.runs.readahead import read_ahead
    from kvlens.runs.request import RunRequest, parse_chat_args, parse_set
    from kvlens.runs.stopping import stop_signals
    from kvlens.text.carried import parse_turns
    from kvlens.text.prompts import asking, expecting, segmented

    reporter: Bar | JsonLines = JsonLines() if progress_json else Bar(err)
    cancelled = stop_signals()
    outcomes: list[tuple[str, str, str]] = []
    try:
        talk = conversation_in(prompt_file)
        source, system = talk.prompt, system_of(talk, system)
        if answer and len(ask or ()) > 1:
            raise ValueError("--answer is what one question's answer contains: leave it out, or ask one question.")
        sources = [expecting(asking(source, words), answer, needle) for words in ask or ()]
        sources = [segmented(part, segment or ()) for part in sources or [expecting(source, answer, needle)]]
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
            chat=chat,
            system=system,
            turns=talk.turns,
            carried=parse_turns(turns),
            chat_args=parse_chat_args(chat_arg or []),
            question=question,
            device=device,
            dtype=dtype,
            trace_level=trace_level,
            coverage=coverage,
            phases=phases,
            oracle=oracle,
            threads=threads,
            ignore_eos=ignore_eos,
            against=against_full or forced,
            forced_reference=forced,
        )
        context = runs_folder(runs), reporter.report, cancelled, reporter.say
        with reserve_stdout(progress_json):
            if ahead:
                raise typer.Exit(int(not read_ahead(request, sources[0], reporter.report, cancelled)))
            turn_cancelled = None
            if turns is not None:
                request, turn_cancelled = answer_turns(
                    request, sources[0], lambda turn, text: carry_out(turn, text, *context)
                )
            if turn_cancelled is not None:
                outcomes.append(turn_cancelled)
            elif len(sources) > 1:
                outcomes.extend(carry_out_each(request, sources, *context))
            else:
                audience = reporter if isinstance(reporter, JsonLines) else None
                outcomes.append(carry_out(request, sources[0], *context, audience=audience))
    except BaseException as error:
        fault = stray(method, error)
        reporter.failed(fault)
        if not progress_json:
            for uid, _, _ in outcomes:  # what was run before is stored
                typer.echo(uid)
        if fault is error:
            raise
        raise fault from error
    for uid, status, _ in outcomes:
        reporter.end_run(uid, status)
    if not progress_json and len(sources) > 1 and turn_cancelled is None:
        _table(ask or [], outcomes)
    elif not progress_json:
        typer.echo(terminal(outcomes[0][2]) if sys.stdout.isatty() else outcomes[0][2])
        print_verdict(runs_folder(runs), outcomes[0][0])
        typer.echo(outcomes[0][0])
    uid, status, _ = outcomes[-1]
    if status != "completed":
        fail(f"the run was cancelled; what was recorded is stored as {uid}.")
    for uid, _, _ in outcomes:
        refuse_unsound(runs_folder(runs), uid)


def print_verdict(folder: Path, uid: str) -> None:
    """Print to stderr what a stored run lost, which KV head missed what, and why, if it was compared with full KV."""
    from kvlens.api.verdict import read_verdict
    from kvlens.store.reader import TraceReader

    with TraceReader.open(folder, uid) as reader:
        verdict = read_verdict(reader)
    if verdict.outcome != "not_compared":
        typer.echo(terminal(str(verdict)), err=True)


def refuse_unsound(folder: Path, uid: str) -> None:
    """End the command with one sentence and status 1 if a stored run failed a self-check."""
    from kvlens.lens.severity import failed_checks
    from kvlens.store.reader import TraceReader

    with TraceReader.open(folder, uid) as reader:
        failed = failed_checks(reader)
    if failed:
        fail(f"self_check_failed: run {uid} is stored, but failed {', '.join(failed)}: see kvlens runs show {uid}.")


def _table(questions: list[str], outcomes: list[tuple[str, str, str]]) -> None:
    """Question and answer of every run, then the runs' uids, a line each."""
    from rich import box
    from rich.table import Table

    table = Table("question", "answer", "run", box=box.SIMPLE)
    for question, (uid, _, text) in zip(questions, outcomes, strict=False):
        table.add_row(*(escape(terminal(" ".join(part.split()))) for part in (question, text)), uid)
    Console(soft_wrap=False).print(table)
    for uid, _, _ in outcomes:
        typer.echo(uid)
