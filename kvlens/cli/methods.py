"""`kvlens methods`: what there is to run, its parameters, and what they come to on a model."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvlens.cli.options import DEFAULT_MODEL, AsJson, Model, show_table

PRESSES = (
    "Where kvpress is installed, --method kvpress:NAME runs a press of it that scores tokens, as prompt eviction "
    "(docs/methods/index.md)."
)

COMPOSED = (
    "Parts of methods join others: PART:METHOD and METHOD+PART, METHOD@PART (docs/methods/index.md). "
    "`kvlens methods NAME` shows a composed method as well."
)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method's parameters.")] = None,
    model: Model = DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """The methods, or one method with its parameters: the paper's, and what the preset `fit` comes to on a model."""
    from kvlens import methods as registered
    from kvlens.runs.usualfit import fits

    entries = registered.catalogue() if name is None else [registered.entry(name)]
    for entry in entries if as_json or name is not None else ():
        entry["fits"] = [{"model": model, **fit} for fit in fits(model, entry["name"])]
    if as_json:
        typer.echo(json.dumps(entries if name is None else entries[0], ensure_ascii=False))
    elif name is None:
        show_table(
            ["family", "name", "title", "what it does", "trained or calibrated", "paper"],
            [
                [
                    m["family"].replace("_", " "),
                    m["name"],
                    _title(m, model),
                    m["summary"],
                    "; ".join(m["trained"]) or "nothing",
                    m["paper"],
                ]
                for m in entries
            ],
        )
        typer.echo(PRESSES)
        typer.echo(COMPOSED)
        for sentence in registered.refused().values():
            typer.echo(sentence, err=True)
    else:
        _print_method(entries[0], model)


def _title(method: dict[str, Any], model: str) -> str:
    """Return what a method is called on a model with its usual preset."""
    from kvlens.methods.naming import preset_name
    from kvlens.runs.request import default_preset

    return preset_name(method["name"], default_preset(method["name"], model))


def _print_method(method: dict[str, Any], model: str) -> None:
    """A method's parameters, a column for what `fit` makes of each at every point."""
    typer.echo(f"{_title(method, model)} ({method['name']}): {method['summary']}\n{method['paper']}")
    typer.echo(f"family: {method['family'].replace('_', ' ')}")
    typer.echo(f"trained or calibrated: {'; '.join(method['trained']) or 'nothing'}")
    points = [f"fit, {f['tokens']:,} at {f['budget'] or 'no limit'}" for f in method["fits"]]
    paper = method["presets"].get("paper", {})
    rows = [
        [
            p["name"],
            paper.get(p["name"], p["default"]),
            *(f["fit"].get(p["name"], p["default"]) for f in method["fits"]),
            p["symbol"],
            "ours" if p["ours"] else "paper",
            p["doc"],
        ]
        for p in method["parameters"]
    ]
    show_table(["parameter", "paper's preset", *points, "symbol", "decided by", "meaning"], rows)
    for preset, values in method["presets"].items():
        typer.echo(f"preset {preset}: {' '.join(f'{k}={v}' for k, v in values.items()) or 'the defaults'}")
    typer.echo(f"preset fit: {method['fit']}")
    for fit in method["fits"]:
        suffix = f"{fit['tokens']:,} tokens of {model} at {fit['budget'] or 'no limit'}"
        typer.echo(
            f"{suffix}: runs with preset {fit['preset'] or 'none'}; its usual numbers need {fit['usual_needs']:.1%} of "
            f"full KV, fit {fit['needs']:.1%}"
        )
