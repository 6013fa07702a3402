"""The commands and code blocks of README.md."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language ("" if the fence names none) and its lines."""

    language: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines) + "\n"


def blocks(page: Path = README) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [Block(language, tuple(text.splitlines())) for language, text in fences]


def shell_lines(page: Path = README) -> list[str]:
    """Return the command lines of a page: the lines of blocks that are not Python or TOML, without their comments."""
    lines = [line for block in blocks(page) if block.language not in ("python", "toml") for line in block.lines]
    bare = [re.sub(r"\s+#.*$", "", line).strip() for line in lines]
    return [line for line in bare if line and not line.startswith("#")]


def inline_commands(page: Path = README) -> list[str]:
    """Return the `kvlens ...` and `make ...` commands in the running text of a page."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`((?:kvlens|make) [^`]+)`", prose)


def subcommand(line: str) -> list[str]:
    """Return the words of a kvlens command up to its first argument: ["models", "add"] of `kvlens models add FILE`."""
    words = shlex.split(line)[1:]
    names = [word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)]
    return names[: next((n for n, word in enumerate(words) if word not in names), len(names))]


def make_targets(root: Path = ROOT) -> set[str]:
    """Return the targets that the Makefile declares phony."""
    text = (root / "Makefile").read_text(encoding="utf-8")
    return {target for line in re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE) for target in line.split()}


ELSEWHERE = {
    'pip install "kvlens[app]"': "tests/unit/test_packaging.py",
    "kvlens app": "tests/unit/test_app_command.py",
    "make app": "tests/uiserver.py",
    "make test": ".ci/run",
}
"""command -> the file that runs it"""


def commands() -> list[str]:
    """Return the commands of README that run here, in its order."""
    return [line for line in shell_lines() if line not in ELSEWHERE]


def python_blocks() -> tuple[str, str]:
    """Return the block that uses the API and the block that defines a method."""
    api, method = [block.text for block in blocks() if block.language == "python"]
    return api, method
