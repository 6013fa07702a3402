"""`kvlens runs`: the stored runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kvlens.cli.options import AsJson, RunsDir, err, runs_folder, show_table
from kvlens.text.plaintext import json_text, terminal
from kvlens.text.valuetext import value_text

if TYPE_CHECKING:
    from kvlens.store.reader import TraceReader


class Listed(TyperGroup):
    """A group that without a command is its command `list`, whose options it takes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            listing = self.commands["list"]
            rest = listing.make_parser(ctx).parse_args(list(args))[1]
            if rest and rest[0] in self.commands:
                name = rest[0]
                raise ValueError(f"options of `kvlens runs {name}` go behind its name: `kvlens runs {name} --...`.")
            args = ["list", *args]
        return super().parse_args(ctx, args)


runs_app = typer.Typer(
    cls=Listed,
    help="List, show, name, recover and delete runs. Without a command: list them, with the options of "
    "`kvlens runs list`.",
)


@runs_app.command("list")
def runs_list(
    method: Annotated[str | None, typer.Option(help="Runs of this method alone.")] = None,
    model: Annotated[str | None, typer.Option(help="Runs of this model alone.")] = None,
    outcome: Annotated[
        str | None, typer.Option(help="right, wrong, cut_off, lost, diverged, kept, unsound or unknown; see above.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Runs with this tag alone.")] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Words that are all in the prompt (its beginning or end), answer, output, name, note, tags."),
    ] = None,
    runs: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """The runs of the folder, newest first, with what came of each; of all of them those that are asked for.

    Outcomes: right and wrong answers; cut_off: a wrong answer that the limit of new tokens cut off; lost: left full KV
    and lost what was asked for; diverged: left full KV at no known cost; kept: never left full KV; unsound: failed a
    self-check; unknown. Of a run whose trace cannot be read, the code says why, such as trace_damaged."""
    from kvlens import methods
    from kvlens.lens.listing import Search
    from kvlens.lens.outcomelabel import outcome_label
    from kvlens.lens.runlist import search_runs
    from kvlens.methods.naming import recorded_stand_in, titled
    from kvlens.models.find import short_model
    from kvlens.runs.folder import listed_folder

    query = Search(text or "", method, model, outcome, tag)
    query.check()
    folder = listed_folder(runs)
    with err.status("Reading what came of each run"):
        listed = search_runs(folder, query)
    for problem in listed.attrs["problems"]:
        err.print(f"kvlens: {terminal(problem)}", markup=False, highlight=False)
    if as_json:
        typer.echo(listed.to_json(orient="records", double_precision=15))
        return
    if not listed.attrs["stored"]:
        typer.echo(f"no runs in {folder}; start one with: kvlens run PROMPT_FILE")
        return
    if listed.empty:
        if method is not None:
            methods.get(method)  # a name that is none is said
        typer.echo(f"none of the {listed.attrs['stored']} runs in {folder} is what you look for")
        return
    columns = [
        "uid",
        "name",
        "tags",
        "status",
        "model",
        "method",
        "preset",
        "held to",
        "KV in",
        "outcome",
        "output_text",
    ]
    # a forced run did not write its tokens, and what came of a what-if is not the method's doing
    listed["output_text"] = listed["output_text"].where(
        ~listed["forced"].fillna(value=False).astype(bool), "(fed) " + listed["output_text"]
    )
    listed["output_text"] = listed["output_text"].where(
        ~(listed["hold"].eq(True) | listed["changed"].eq(True)), "(what-if) " + listed["output_text"]
    )
    listed["tags"] = listed["tags"].map(", ".join)
    listed["model"] = listed["model"].map(lambda name: short_model(name) if isinstance(name, str) else name)
    listed["method"] = [
        f"{titled(row['method'], recorded_stand_in(row))} {row['differs']}".strip()
        if isinstance(row["method"], str)
        else row["method"]
        for row in listed.to_dict("records")
    ]
    outcomes = zip(listed["outcome"], listed["outcome_kinds"], strict=True)
    listed["outcome"] = [outcome_label(words, kinds) if isinstance(words, str) else words for words, kinds in outcomes]
    listed["outcome"] = listed["outcome"].where(listed["problem"].isna(), listed["problem"])
    listed = listed.rename(columns={"held_to": "held to", "dtype": "KV in"})
    shown = [name for name in columns if name not in ("name", "tags") or listed[name].map(len).any()]
    show_table(shown, list(map(list, zip(*(listed[name].tolist() for name in shown), strict=True))))


@runs_app.command("note")
def runs_note(
    uid: str,
    name: Annotated[str | None, typer.Option(help="What to call the run; '' takes the name away.")] = None,
    note: Annotated[str | None, typer.Option(help="What to remember of it; '' takes the note away.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A tag to give it; may be repeated.")] = None,
    untag: Annotated[list[str] | None, typer.Option(help="A tag to take away; may be repeated.")] = None,
    runs: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Name a run, note something of it, tag it; prints what is said of it then. Its record stays as it is."""
    from kvlens.store.about import change_about, read_about, write_about
    from kvlens.store.runinfo import run_dir

    folder = runs_folder(runs)
    previous = read_about(run_dir(folder, uid))
    about = change_about(previous, name, note, tag or (), untag or ())
    if about != previous:
        write_about(folder, uid, about)
    if as_json:
        typer.echo(json_text(about.model_dump()))
        return
    for field, value in (("name", about.name), ("tags", ", ".join(about.tags)), ("note", about.note)):
        typer.echo(f"{field:5} {terminal(value, 6)}")


@runs_app.command("show")
def runs_show(uid: str, runs: RunsDir = None, as_json: AsJson = False) -> None:
    """What a run is, what came out, the verdict, the self-check: fields with a value. --json has all of them."""
    from kvlens.api.verdict import read_verdict
    from kvlens.budget import of_run
    from kvlens.lens.outcomelabel import outcome_label
    from kvlens.lens.output import output_text
    from kvlens.lens.severity import outcome
    from kvlens.store.reader import TraceReader

    with TraceReader.open(runs_folder(runs), uid) as reader:
        limit = of_run(reader.meta.budget, reader.meta.budget_bytes)
        meta, steps, came = reader.meta, reader.steps(), outcome(reader)
        checks = json.loads(reader.self_checks().to_json(orient="records"))
        keys = (
            "model",
            "method",
            "preset",
            "stand_in",
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
            "reference_output",
            "parent",
            "hold",
            "drop",
            "changed",
            "device",
            "dtype",
            "task",
            "answer",
            "question",
            "question_tokens",
            "machine",
            *("torch", "transformers", "kvlens"),
        )
        shown: dict[str, Any] = {
            "uid": reader.uid,
            **_about_fields(reader),
            "status": reader.status,
            "error": reader.error,
            **meta.pick(keys),
            "max_new": meta.asked_new,
            "steps": reader.n_steps,
            "output_text": output_text(reader),
            "verdict": str(read_verdict(reader)),
            **{key: value for key, value in came.columns().items() if key != "expected"},
            "peak_bytes": None if steps.empty else int(steps["peak_bytes"].max()),
            "self_check": checks,
        }
    if as_json:
        typer.echo(json_text(shown))
        return
    shown |= {"budget": limit, "outcome": outcome_label(came.words, came.kinds)}
    for key, value in shown.items():
        if key != "self_check" and (text := value_text(value)):
            typer.echo(f"{key:15} {terminal(text, 16)}")
    for check in checks:
        detail = terminal(f"{check['name']}: {check['detail']}", 22)
        typer.echo(f"self-check      {'pass' if check['passed'] else 'FAIL'}  {detail}")


def _about_fields(reader: TraceReader) -> dict[str, Any]:
    """Its name, note and tags; the reason where they cannot be read."""
    from kvlens.store.reader import TraceError

    try:
        return reader.about().model_dump()
    except TraceError as problem:
        return {"about_error": str(problem)}


@runs_app.command("recover")
def runs_recover(uid: str, runs: RunsDir = None) -> None:
    """Make an interrupted run complete up to its last written step."""
    from kvlens.store.recover import recover

    recovered = recover(runs_folder(runs), uid)
    typer.echo(f"{uid}: recovered; {recovered.steps} steps are readable")
    if recovered.lost is not None:
        err.print(f"kvlens: {terminal(recovered.lost)}", markup=False, highlight=False)


@runs_app.command("delete")
def runs_delete(uid: str, runs: RunsDir = None) -> None:
    """Delete a run's folder. A run that is being written is refused."""
    from kvlens.store.recover import delete_run

    delete_run(runs_folder(runs), uid)
    typer.echo(f"{uid}: deleted")
