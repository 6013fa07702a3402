"""`kvlens check-method`: the truths of every run, on one method."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from kvlens.cli.options import AsJson, err
from kvlens.text.plaintext import strict_json, terminal


def check_method(
    name: Annotated[str, typer.Argument(help="A method of `kvlens methods`, a plugin's, kvpress:NAME, or FILE.py.")],
    as_json: AsJson = False,
    progress_json: Annotated[
        bool, typer.Option("--progress-json", hidden=True, help="One JSON object per case.")
    ] = False,
    digest: Annotated[
        str | None, typer.Option("--sha256", hidden=True, help="Refuse FILE.py unless it has this SHA-256.")
    ] = None,
) -> None:
    """Check that a method keeps to the truths of every run, on small random models and the demo model. One line per
    truth; a truth that fails names its smallest case. Exit status 1 if one fails. FILE.py is run as code, with your
    rights; FILE.py:NAME names one of several methods in it."""
    import torch

    from kvlens import methods
    from kvlens.checking.check import TRUTHS, Case
    from kvlens.checking.check import check_method as check
    from kvlens.checking.methodfile import read_method
    from kvlens.methods.faults import stray
    from kvlens.methods.filenames import is_method_file

    torch.set_num_threads(1)
    counter = itertools.count(1)
    try:
        with err.status("reading the method") as status:

            def report(case: Case) -> None:
                status.update(f"{case.model.name}, {case.prompt_tokens} prompt tokens")
                if progress_json:
                    typer.echo(strict_json({"phase": "case", "done": next(counter), "total": 0}))

            result = check(read_method(name, digest) if is_method_file(name) else methods.get(name), report)
    except SystemExit as error:
        raise stray(name, error) from error
    if as_json:
        typer.echo(strict_json(result.plain()))
    else:
        for finding in result.findings.values():
            line = f"{finding.status:5} {TRUTHS[finding.truth]} ({finding.cases} cases)"
            typer.echo(terminal(line if finding.failure is None else f"{line}: {finding.failure}"))
        if result.refused:
            typer.echo(terminal(f"{len(result.refused)} cases refused, the first: {result.refused[0]}"))
    if not result.passed:
        raise typer.Exit(1)
