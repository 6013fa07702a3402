"""Render a chat template: a program of its own, because a template is a stranger's program that may never end.

Reads one JSON object on standard input ({"template", "specials", "renders": [{"messages", "begin_answer"}]}) and writes
one on standard output ({"texts": [...]} or {"error": "..."}). Imports nothing of kvlens.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationBlock(jinja2.ext.Extension):
    """The block `{% generation %}`, by which templates mark answers for training: its content as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse(reason: str) -> None:
    """`raise_exception` of Hugging Face's templates."""
    raise jinja2.TemplateError(reason)


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox with what Hugging Face's templates may use."""
    world = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    world.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
    world.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return world


def render(order: dict[str, Any]) -> dict[str, Any]:
    """Return {"texts"} of all renders, or {"error"} with the first line of what the template raised."""
    try:
        template = environment().from_string(order["template"])
        texts = [
            template.render(
                messages=item["messages"],
                add_generation_prompt=item["begin_answer"],
                tools=None,
                documents=None,
                **order["specials"] | order["arguments"],
            )
            for item in order["renders"]
        ]
    except Exception as error:
        return {"error": str(error).strip().partition("\n")[0][:160] or type(error).__name__}
    return {"texts": texts}


def limit(seconds: int, size: int) -> None:
    """Limit this process to so many seconds of processor time and bytes of address space, where the system can."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    except (ImportError, ValueError, OSError):
        return  # no such limits here, or lower ones: the caller's clock ends the process


if __name__ == "__main__":
    limit(*map(int, sys.argv[1:3]))
    json.dump(render(json.load(sys.stdin)), sys.stdout)
