"""`kvlens race`: one prompt under several methods at one budget, each lane stored as a run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvlens.cli.options import DEFAULT_MODEL, AsJson, Device, Model, ProgressJson, RunsDir, fail, out, runs_folder
from kvlens.cli.prompting import ChatArg, Segment, Turns, conversation_in, system_of
from kvlens.runs.request import DEFAULT_SHARE
from kvlens.text.plaintext import terminal


def race(
    prompt_file: Annotated[
        str,
        typer.Argument(
            help='UTF-8 text (.txt, .md), .json with a string "text" or chat "messages", or - for standard input.'
        ),
    ],
    methods: Annotated[
        str,
        typer.Option(
            help="Names with commas between them; one that is named twice races against itself. Full KV runs beside "
            "them always."
        ),
    ],
    budget: Annotated[
        str,
        typer.Option(
            help="What every method is held to: a share of full KV in --dtype, tokens or bytes, as for `run`."
        ),
    ] = DEFAULT_SHARE,
    model: Model = DEFAULT_MODEL,
    preset: Annotated[list[str] | None, typer.Option(help="method:preset; may be repeated.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="method:parameter=value; may be repeated. Of a method that is named several times: once for all its "
            "lanes, or once for each, in their order.",
        ),
    ] = None,
    max_new: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    answer: Annotated[str | None, typer.Option(help="What a right output contains.")] = None,
    needle: Annotated[str | None, typer.Option(help="Words of the prompt that hold the answer.")] = None,
    segment: Segment = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    chat: Annotated[str, typer.Option(help="auto, on or off, as for `run`.")] = "auto",
    system: Annotated[str | None, typer.Option(help="The chat form's system message.")] = None,
    chat_arg: ChatArg = None,
    question: Annotated[str, typer.Option(help="in or after, as for `run`.")] = "in",
    ask: Annotated[str | None, typer.Option(help="A question about the prompt file's text.")] = None,
    turns: Turns = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option(help="torch threads, as for `run`.")] = 0,
    runs: RunsDir = None,
    as_json: AsJson = False,
    progress_json: ProgressJson = False,
) -> None:
    """Run a prompt under several methods, decoding together, and under full KV. One line per lane at the end, and the
    race's id."""
    from kvlens.cli.progress import JsonLines, reserve_stdout
    from kvlens.cli.racetable import RaceTable, line
    from kvlens.runs.entrants import entrants
    from kvlens.runs.race import race as carry_out
    from kvlens.runs.races import RaceRequest
    from kvlens.runs.request import RunRequest, parse_chat_args
    from kvlens.runs.stopping import stop_signals
    from kvlens.text.carried import parse_turns
    from kvlens.text.prompts import asking, expecting, segmented

    live = sys.stdout.isatty() and not as_json and not progress_json
    audience: JsonLines | RaceTable = JsonLines() if progress_json else RaceTable(out, live)
    cancelled = stop_signals()
    try:
        talk = conversation_in(prompt_file)
        source = talk.prompt
        source = expecting(source if ask is None else asking(source, ask), answer, needle)
        source = segmented(source, segment or ())
        shared = RunRequest(
            model=model,
            budget=budget,
            max_new=max_new,
            seed=seed,
            temperature=temperature,
            chat=chat,
            system=system_of(talk, system),
            turns=talk.turns,
            carried=parse_turns(turns),
            chat_args=parse_chat_args(chat_arg or []),
            question=question,
            device=device,
            dtype=dtype,
            threads=threads,
            ignore_eos=ignore_eos,
        )
        request = RaceRequest(shared=shared, entrants=entrants(methods, preset or [], set_ or []))
        with reserve_stdout(progress_json or as_json):
            result = carry_out(request, source, runs_folder(runs), audience, cancelled)
    except BaseException as error:
        if isinstance(audience, JsonLines):
            audience.failed(error)
        raise
    finally:
        if isinstance(audience, RaceTable):
            audience.stop()
    stopped = any(lane.state == "cancelled" for lane in result.lanes)
    if isinstance(audience, JsonLines):
        audience.end_run(str(result.lanes[0].uid), "cancelled" if stopped else "completed", result.id)
    elif as_json:
        typer.echo(result.model_dump_json())
    else:
        for lane in result.lanes:
            typer.echo(terminal(line(lane)) if sys.stdout.isatty() else line(lane))
        typer.echo(result.id)
    if stopped:
        fail(f"the race was cancelled; what was recorded of its lanes is stored, see race {result.id}.")
