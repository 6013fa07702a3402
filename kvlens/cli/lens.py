"""`kvlens pair` and `kvlens whatif`: a stored run beside full KV, and the same run with something held or another
budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlens.cli.options import AsJson, ProgressJson, RunsDir, err, runs_folder
from kvlens.lens.search import MOST
from kvlens.lens.search_words import describe_search
from kvlens.text.units import counted

if TYPE_CHECKING:
    from kvlens.cli.progress import Bar, JsonLines
    from kvlens.holds import Range
    from kvlens.metaparts import Counterfactual
    from kvlens.runs.storing import Stored
    from kvlens.runs.watching import Audience

    Done = tuple[Stored, list[str]]


def pair(
    uid: str,
    forced: Annotated[bool, typer.Option("--forced", help="Feed full KV's tokens, so that all steps compare.")] = False,
    runs: RunsDir = None,
    progress_json: ProgressJson = False,
) -> None:
    """Repeat a stored run beside its full-KV reference. The last line of stdout is the new run's uid."""
    from kvlens.runs.repeatpair import pair as repeat

    def work(folder: Path, reporter: Bar | JsonLines, cancelled: Callable[[], bool], audience: Audience | None) -> Done:
        stored, reference = repeat(folder, uid, forced, reporter.report, cancelled, audience)
        return stored, [stored.text, f"reference {reference}"]

    _carry_out(work, runs, progress_json)


def whatif(
    context: typer.Context,
    uid: str,
    span: Annotated[
        list[int] | None, typer.Option(help="Id of a span to hold exactly on the device; may be repeated.")
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option(help="Positions of tokens to hold, like 396-401 or 396; may be repeated.")
    ] = None,
    segment: Annotated[
        list[str] | None,
        typer.Option(help="Name of a part of the prompt to hold (`kvlens runs segments UID`); may be repeated."),
    ] = None,
    layers: Annotated[str, typer.Option(help="all, or like 0,2-4.")] = "all",
    heads: Annotated[str, typer.Option(help="KV heads: all, or like 0,1.")] = "all",
    hold: Annotated[
        list[str] | None,
        typer.Option(
            help="A span or tokens with heads of their own, like 40, t396-401, 40.L2 or 40.L2.KV1; may be repeated."
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            help="A span or tokens, written as for --hold, that are not attended at all: does the answer hang on "
            "them? May be repeated."
        ),
    ] = None,
    from_step: Annotated[int, typer.Option(help="First step at which it is held or dropped.")] = 0,
    budget: Annotated[str | None, typer.Option(help="Another budget, as for `kvlens run`.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="name=value: another parameter of the method; may be repeated.")
    ] = None,
    fair: Annotated[
        bool, typer.Option("--fair", help="Divide the budget over the prompt's segments: each keeps the same share.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Find few (layer, KV head) that bring the answer back; hold for those.")
    ] = False,
    fewest_bytes: Annotated[
        bool,
        typer.Option(
            "--fewest-bytes",
            help="Find the (layer, KV head, span) that bring the answer back with the fewest bytes; hold those.",
        ),
    ] = False,
    fewest_bits: Annotated[
        bool,
        typer.Option(
            "--fewest-bits",
            help="Find the keys or values of KV heads of a quantised run that bring the answer back with the fewest "
            "extra bits; store those so.",
        ),
    ] = False,
    most: Annotated[int, typer.Option(help="Sets that --fewest-bytes or --fewest-bits tries at most.")] = MOST,
    tried: Annotated[bool, typer.Option("--list", help="List what was tried on this run, and run nothing.")] = False,
    as_json: AsJson = False,
    runs: RunsDir = None,
    progress_json: ProgressJson = False,
) -> None:
    """Repeat a stored run with spans or ranges of tokens held, or dropped, for some heads, or with another budget or
    other parameters, everything else as it was. The last line of stdout is the new run's uid."""
    from kvlens.cli.fair import change_of, kept_lines
    from kvlens.cli.tries import listed

    typed_options = {str(option.opts[0]) for option in context.command.params if _is_given(context, option.name)}
    if tried:
        if beside := sorted(typed_options - {"uid", "--list", "--json", "--runs"}):
            raise ValueError(f"--list runs nothing: leave out {', '.join(beside)}, or --list.")
        listed(runs_folder(runs), uid, as_json)
        return
    if "--most" in typed_options and not (fewest_bytes or fewest_bits):
        raise ValueError("--most goes with --fewest-bytes or --fewest-bits: it says how many sets that tries.")
    if as_json:
        raise ValueError("--json goes with --list; --progress-json reports a run in JSON lines.")
    from kvlens.lens.pieces import Piece
    from kvlens.lens.trial_request import TrialRequest, token_range
    from kvlens.lens.whatif import whatif as repeat
    from kvlens.runs.request import parse_set

    changed = parse_set(set_ or [])
    if "budget" in changed:
        raise ValueError("--set budget: give the budget with --budget.")
    if budget is not None:
        changed["budget"] = budget
    if fair:
        changed |= change_of(runs_folder(runs), uid)
    request = TrialRequest(
        tuple(span or ()),
        layers,
        heads,
        from_step,
        search,
        (*map(token_range, tokens or ()), *_ranges(runs_folder(runs), uid, segment or ())),
        tuple(map(Piece.parse, hold or ())),
        changed,
        most if fewest_bytes else None,
        tuple(Piece.parse(text, "--drop") for text in drop or ()),
        most if fewest_bits else None,
    )

    def work(folder: Path, reporter: Bar | JsonLines, cancelled: Callable[[], bool], audience: Audience | None) -> Done:
        stored, summary = repeat(folder, uid, request, reporter.report, cancelled, reporter.say, audience=audience)
        return stored, [*sentences(summary), *(kept_lines(folder, uid, stored) if fair else ())]

    _carry_out(work, runs, progress_json)


def _ranges(folder: Path, uid: str, names: Sequence[str]) -> list[Range]:
    """Return the positions of a stored run's segments."""
    from kvlens.lens.segments import segment_ranges
    from kvlens.store.reader import TraceReader

    if not names:
        return []
    with TraceReader.open(folder, uid) as reader:
        return [part for name in names for part in segment_ranges(reader, name)]


def _is_given(context: typer.Context, name: str | None) -> bool:
    """The option stands on the command line."""
    source = None if name is None else context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def sentences(summary: Counterfactual | None) -> list[str]:
    """The summary of a counterfactual (meta `whatif`), for people. Empty for a run that was cancelled."""
    from kvlens.lens.tries import outcome

    if summary is None:
        return []
    source = "the known answer" if summary.expected_from == "task" else "what full KV says"
    lines = [
        f"answer before  {summary.answer_before!r}",
        f"answer after   {summary.answer_after!r}",
        f"expected       {summary.expected!r} ({source})",
    ]
    if summary.dropped_tokens is not None and summary.step is not None:
        agreement = "agrees with full KV" if summary.agrees_after else "differs from full KV"
        lines.append(
            f"step {summary.step:<9} KL {_nats(summary.kl_before)} -> {_nats(summary.kl_after)} nats, {agreement}"
        )
    elif summary.step is None:
        lines.append("every step agreed with full KV before: there was no loss to bring back")
    else:
        agreement = "agrees with full KV" if summary.agrees_after else "still differs from full KV"
        lines.append(
            f"step of loss   {summary.step}: KL {summary.kl_before:.4g} -> {summary.kl_after:.4g} nats, {agreement}"
        )
    untouched = "nothing was lost before" if summary.step is None else "the answer was right before"
    if summary.dropped_tokens is None and (summary.answer_known or summary.restored is None):
        lines.append({True: "restored", False: "not restored", None: untouched}[summary.restored])
    else:
        lines.append(f"{'the answer' if summary.answer_known else 'the tokens':<14} {outcome(summary)}")
    if summary.dropped_tokens is not None:
        lines.append(f"dropped        {summary.dropped_tokens:,} tokens, which stay where they lie: no byte is freed")
    if summary.lifted_tokens:
        lifted = counted(summary.lifted_tokens, "token")
        lines.append(f"drop lifted    {lifted}, 0 bytes: the answer is the same without a hold")
    if (summary.dropped_tokens is None and not summary.lifted_tokens) or summary.held_tokens:
        lines.append(f"held           {summary.held_tokens:,} tokens, {summary.held_bytes:,} bytes of keys and values")
    if (search := summary.search) is not None:
        lines.append(f"search         {describe_search(search)}")
    return lines


def _nats(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.4g}"


def _carry_out(
    work: Callable[[Path, Bar | JsonLines, Callable[[], bool], Audience | None], Done],
    runs: Path | None,
    progress_json: bool,
) -> None:
    """Run `work` with a reporter and print what it says, as `kvlens run` does."""
    from kvlens.cli.progress import Bar, JsonLines, reserve_stdout
    from kvlens.runs.stopping import stop_signals

    reporter: Bar | JsonLines = JsonLines() if progress_json else Bar(err)
    cancelled = stop_signals()
    try:
        with reserve_stdout(progress_json):
            audience = reporter if isinstance(reporter, JsonLines) else None
            stored, lines = work(runs_folder(runs), reporter, cancelled, audience)
    except BaseException as error:
        reporter.failed(error)
        raise
    reporter.end_run(stored.uid, stored.status)
    if not progress_json:
        sys.stdout.writelines(f"{line}\n" for line in (*lines, stored.uid))
    if stored.status != "completed":
        raise ValueError(f"the run was cancelled; what was recorded is stored as {stored.uid}.")
