"""`kvlens study`: prompts under methods, values of parameters and budgets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlens.cli.options import DEFAULT_MODEL, AsJson, Device, Model, ProgressJson, RunsDir, err, fail, runs_folder
from kvlens.cli.prompting import ChatArg, Segment, Turns
from kvlens.runs.request import DEFAULT_SHARE
from kvlens.text.plaintext import json_text, terminal
from kvlens.workers.lanes import Crew

if TYPE_CHECKING:
    from kvlens.studies.plan import Arm, StudyPlan
    from kvlens.studies.promptrow import StudyPrompt
    from kvlens.studies.storage import Trial


Workers = Annotated[int, typer.Option(min=1, max=256, help="Processes that share the prompts, or actors of --ray.")]
MOST_AT_ONCE = 64
"""prompts"""
Batch = Annotated[int, typer.Option(min=1, max=MOST_AT_ONCE, help="Prompts whose decode steps are computed together.")]
RayAddress = Annotated[str | None, typer.Option("--ray", help="Address of a Ray cluster; needs the package ray.")]


class Lines:
    """Prints a line for every trial that ends; `as_json`: JSON objects on stdout, for programs."""

    def __init__(self, plan: StudyPlan, as_json: bool = False) -> None:
        """plan: whose arms the lines name, as `kvlens studies show` and `compare` do."""
        from kvlens.cli.progress import JsonLines
        from kvlens.studies.plan import labels

        self._json = JsonLines() if as_json else None
        self._names = labels(plan.arms(), plan.shared.model)

    def report(self, phase: str, number: int, total: int) -> None:
        """Pass on to programs that the model is being loaded; of a trial's own phases nothing is said."""
        if self._json is not None and phase in ("convert", "load"):
            self._json.report(phase, number, total)

    def trial(self, finished: int, total: int, prompt: StudyPrompt, arm: Arm, trial: Trial) -> None:
        """See kvlens.studies.running.Audience."""
        if self._json is not None:
            fields = {"phase": "trial", "done": finished, "total": total, **vars(trial)}
            typer.echo(json_text(fields))
            return
        words = trial.message or (trial.figures or {}).get("outcome") or trial.state
        line = f"{finished}/{total} {prompt.id} {self._names[arm.key()]}: {words}"
        err.print(terminal(line), markup=False, highlight=False)


def study(
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="Files of prompts (.jsonl, .jsonl.gz, .csv, .json, .txt), KIND:PATH of a benchmark, or generated "
            "tasks, for example niah_single@length=1024@prompts=20."
        ),
    ],
    methods: Annotated[str, typer.Option(help="Names with commas between them; full KV runs beside them always.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="method.parameter=value,value,...; may be repeated.")
    ] = None,
    preset: Annotated[list[str] | None, typer.Option(help="method:preset; may be repeated.")] = None,
    budgets: Annotated[str, typer.Option(help="Shares of full KV, tokens or bytes, with commas.")] = DEFAULT_SHARE,
    questions: Annotated[str, typer.Option(help="in, after or in,after, as for `run --question`.")] = "in",
    seeds: Annotated[str, typer.Option(help="Numbers with commas.")] = "0",
    name: Annotated[str, typer.Option(help="A name for the study.")] = "",
    model: Model = DEFAULT_MODEL,
    max_new: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    chat: Annotated[str, typer.Option(help="auto, on or off, as for `run`.")] = "auto",
    system: Annotated[str | None, typer.Option(help="The chat form's system message.")] = None,
    chat_arg: ChatArg = None,
    segment: Segment = None,
    turns: Turns = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    trace_level: Annotated[str, typer.Option(help="summary, heads or spans, as for `run`.")] = "spans",
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    workers: Workers = 1,
    ray: RayAddress = None,
    batch: Batch = 1,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Say what would be run and what it could decide; run nothing.")
    ] = False,
    runs: RunsDir = None,
    as_json: AsJson = False,
    progress_json: ProgressJson = False,
) -> None:
    """Run prompts under methods, values of their parameters and budgets. Every trial is a stored run. The last line is
    the study's id: `kvlens studies show ID` prints its results, `kvlens studies resume ID` goes on after a stop."""
    from kvlens.budget import distinct_budgets
    from kvlens.runs.entrants import entrants
    from kvlens.runs.request import RunRequest, parse_chat_args
    from kvlens.studies import storage
    from kvlens.studies.models import check_loading
    from kvlens.studies.paired import plan_text
    from kvlens.studies.plan import StudyPlan, parse_values
    from kvlens.studies.promptfile import read_prompts
    from kvlens.tasks.encoding import counting
    from kvlens.text.carried import parse_turns
    from kvlens.text.segments import pairs_of

    crew, names = Crew(workers, ray, batch), parts_of(methods)
    shared = RunRequest(
        model=model,
        max_new=max_new,
        chat=chat,
        system=system,
        chat_args=parse_chat_args(chat_arg or []),
        carried=parse_turns(turns),
        temperature=temperature,
        trace_level=trace_level,
        device=device,
        dtype=dtype,
    )
    plan = StudyPlan(
        name=name,
        shared=shared,
        entrants=entrants(methods, preset or [], []),
        values=parse_values(set_ or [], names),
        budgets=distinct_budgets(parts_of(budgets)),
        questions=parts_of(questions),
        seeds=tuple(number_of(text) for text in parts_of(seeds)),
    )
    plan.check()
    counted = counting(model, chat, system, shared.chat_args)
    read = read_prompts(prompts, counted, pairs_of(segment or ()))
    for sentence in read.faults:
        err.print(f"kvlens: left out: {terminal(sentence)}", markup=False, highlight=False)
    if plan_only:
        typer.echo(plan_text(len(read.prompts), len(plan.arms())))
        return
    check_loading(plan)
    info = storage.create(runs_folder(runs), plan, read.prompts)
    carry_out_stored(runs_folder(runs), info.id, progress_json, as_json, crew)


def carry_out_stored(folder: Path, study_id: str, progress_json: bool, as_json: bool, crew: Crew | None) -> None:
    """Run what a study lacks, and print its id. crew: None: as it was carried out last. Ends the process with status 1
    where the study is not whole, or every trial was refused."""
    from kvlens.cli.progress import reserve_stdout
    from kvlens.runs.stopping import stop_signals
    from kvlens.studies import storage
    from kvlens.studies.running import carry_out

    cancelled = stop_signals()
    lines = Lines(storage.read(folder, study_id).plan, progress_json)
    if progress_json:
        typer.echo(json_text({"phase": "study", "study": study_id}))
    with reserve_stdout(progress_json or as_json):
        whole = carry_out(folder, study_id, lines, cancelled, crew=crew)
    if progress_json:
        typer.echo(json_text({"phase": "done", "study": study_id, "status": "completed" if whole else "stopped"}))
    elif as_json:
        typer.echo(json_text({"study": study_id, "whole": whole}))
    else:
        typer.echo(study_id)
    if not whole:
        fail(f"the study is not whole: go on with `kvlens studies resume {study_id}`.")
    trials = storage.read_trials(folder, study_id)
    if trials and all(trial.state == "refused" for trial in trials):
        fail(f"every trial of study {study_id} was refused: {trials[0].message}")


def parts_of(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def number_of(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--seeds takes whole numbers, not '{text}'.") from None
