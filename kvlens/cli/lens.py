"""`kvlens pair` and `kvlens whatif`: a stored run beside full KV, and the same run with something held."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlens.cli.options import ProgressJson, RunsDir, err, runs_folder

if TYPE_CHECKING:
    from kvlens.meta import Counterfactual
    from kvlens.runs.request import Report
    from kvlens.runs.storing import Stored


def pair(
    uid: str,
    forced: Annotated[bool, typer.Option("--forced", help="Feed full KV's tokens, so that all steps compare.")] = False,
    runs: RunsDir = None,
    progress_json: ProgressJson = False,
) -> None:
    """Repeat a stored run beside its full-KV reference. The last line of stdout is the new run's uid."""
    from kvlens.runs.repeat import pair as repeat

    def work(folder: Path, report: Report, cancelled: Callable[[], bool]) -> tuple[Stored, list[str]]:
        stored, reference = repeat(folder, uid, forced, report, cancelled)
        return stored, [stored.text, f"reference {reference}"]

    _carry_out(work, runs, progress_json)


def whatif(
    uid: str,
    span: Annotated[
        list[int] | None, typer.Option(help="Id of a span to hold exactly on the device; may be repeated.")
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option(help="Positions of tokens to hold, like 396-401 or 396; may be repeated.")
    ] = None,
    layers: Annotated[str, typer.Option(help="all, or like 0,2-4.")] = "all",
    heads: Annotated[str, typer.Option(help="KV heads: all, or like 0,1.")] = "all",
    from_step: Annotated[int, typer.Option(help="First step at which it is held.")] = 0,
    search: Annotated[
        bool, typer.Option("--search", help="Find few (layer, KV head) that bring the answer back; hold for those.")
    ] = False,
    runs: RunsDir = None,
    progress_json: ProgressJson = False,
) -> None:
    """Repeat a stored run with spans or ranges of tokens held for some heads, everything else as it was. The last line
    of stdout is the new run's uid."""
    from kvlens.lens.asked import Asked, token_range
    from kvlens.lens.whatif import whatif as repeat

    ranges = tuple(map(token_range, tokens or ()))
    asked = Asked(tuple(span or ()), layers, heads, from_step, search, ranges)

    def work(folder: Path, report: Report, cancelled: Callable[[], bool]) -> tuple[Stored, list[str]]:
        stored, summary = repeat(folder, uid, asked, report, cancelled)
        return stored, sentences(summary)

    _carry_out(work, runs, progress_json)


def sentences(summary: Counterfactual | None) -> list[str]:
    """The summary of a counterfactual (meta `whatif`), for people. Empty for a run that was cancelled."""
    if summary is None:
        return []
    source = "the known answer" if summary.expected_from == "task" else "what full KV says"
    said = [
        f"answer before  {summary.answer_before!r}",
        f"answer after   {summary.answer_after!r}",
        f"expected       {summary.expected!r} ({source})",
    ]
    if summary.step is None:
        said.append("every step agreed with full KV before: there was no loss to bring back")
    else:
        after = "agrees with full KV" if summary.agrees_after else "still differs from full KV"
        said.append(
            f"step of loss   {summary.step}: KL {summary.kl_before:.4g} -> {summary.kl_after:.4g} nats, {after}"
        )
    untouched = "nothing was lost before" if summary.step is None else "the answer was right before"
    said.append({True: "restored", False: "not restored", None: untouched}[summary.restored])
    said.append(f"held           {summary.held_tokens:,} tokens, {summary.held_bytes:,} bytes of keys and values")
    if (found := summary.search) is not None:
        if found.heads:
            heads = ", ".join(f"layer {layer} KV head {head}" for layer, head in found.heads)
            said.append(
                f"found          {heads} ({found.tried} sets of heads tried, KL {found.kl:.4g} nats over the answer)"
            )
        else:
            said.append("found          nothing: not even holding for all of these heads brings the answer back")
    return said


def _carry_out(
    work: Callable[[Path, Report, Callable[[], bool]], tuple[Stored, list[str]]], runs: Path | None, progress_json: bool
) -> None:
    """Run `work` with a reporter and print what it says, as `kvlens run` does."""
    from kvlens.cli.progress import Bar, JsonLines, stop_signals

    reporter: Bar | JsonLines = JsonLines() if progress_json else Bar(err)
    cancelled = stop_signals()
    try:
        stored, said = work(runs_folder(runs), reporter.report, cancelled)
    except BaseException as error:
        reporter.failed(error)
        raise
    reporter.done(stored.uid, stored.status)
    if not progress_json:
        sys.stdout.writelines(f"{line}\n" for line in (*said, stored.uid))
    if stored.status != "completed":
        raise ValueError(f"the run was cancelled; what was recorded is stored as {stored.uid}.")
