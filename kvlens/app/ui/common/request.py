"""A run as the form describes it, and the command line that carries it out."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlens import methods
from kvlens.lens.knob import asked_in_words
from kvlens.lens.pieces import Piece
from kvlens.text.carried import Turn
from kvlens.text.prompts import PromptText


@dataclass(frozen=True)
class PromptChoice:
    """A checked prompt and where it came from, for the list of jobs."""

    prompt: PromptText
    source: str
    turns: tuple[Turn, ...] = ()
    """of a conversation, what was said before the prompt"""
    system: str | None = None
    """of a conversation that begins with a system message"""
    carried: bool = False
    """whether the first turn is placed and the others are fed to its cache"""

    @property
    def states_question(self) -> bool:
        """Return whether the prompt is of a task, or says where its question begins."""
        return self.prompt.task is not None or self.prompt.question is not None

    def file_text(self) -> str:
        """Content of the prompt file (JSON), with the answer, the needle and the task where they are known. It holds a
        conversation's turns, but for its system message, which is an option of the command."""
        prompt = self.prompt
        content: dict[str, Any] = {"text": prompt.text}
        if self.turns:
            messages = [{"role": role, "content": text} for role, text in (*self.turns, ("user", prompt.text))]
            content = {"messages": messages}
        known_names = {
            "task": prompt.task,
            "answer": prompt.answer,
            "needle": [list(pair) for pair in prompt.needle],
            "seed": prompt.seed,
            "answer_prefix": prompt.answer_prefix,
            "question": prompt.question,
            "answers": list(prompt.answers),
            "segments": {part.name: [part.start, part.end] for part in prompt.segments},
        }
        return json.dumps(
            content | {name: value for name, value in known_names.items() if value not in (None, [], "", {})},
            ensure_ascii=False,
        )


@dataclass(frozen=True)
class MethodChoice:
    """A method, its configuration and the limits of the run."""

    method: str
    model: str
    preset: str | None
    budget: str
    max_new: int
    seed: int
    changed: dict[str, Any] = field(default_factory=dict)
    """parameters that differ from the preset"""
    against: bool = False
    """record what each step loses against full KV"""
    chat: str = "auto"
    """whether the prompt is fed in the model's chat form"""
    system: str | None = None
    question: str = "in"
    """whether the question is read and placed with its context, or fed after it"""
    chat_args: Mapping[str, Any] = field(default_factory=dict)
    """what the chat template is given besides messages"""

    turns: tuple[Turn, ...] = ()
    carried: bool = False
    """of a conversation, as PromptChoice has them"""

    @property
    def form(self) -> dict[str, Any]:
        """How the prompt is fed, as fields of RunRequest."""
        names = ("chat", "system", "question", "turns", "carried")
        return {name: getattr(self, name) for name in names} | {"chat_args": dict(self.chat_args)}


@dataclass(frozen=True)
class Rivals:
    """What races against the chosen method."""

    methods: tuple[str, ...] = ()
    variants: tuple[tuple[str, str], ...] = ()
    """(parameter, value) of each further lane of the chosen method"""

    @property
    def count(self) -> int:
        """Lanes beside the chosen method's own and full KV."""
        return len(self.methods) + len(self.variants)


def command(prompt_file: Path, choice: MethodChoice, runs_dir: Path) -> list[str]:
    """argv of the engine's process. Values are separate arguments; no shell reads them."""
    argv = [
        sys.executable,
        "-m",
        "kvlens",
        "run",
        str(prompt_file),
        "--model",
        choice.model,
        "--method",
        choice.method,
        "--budget",
        choice.budget,
        "--max-new",
        str(choice.max_new),
        "--seed",
        str(choice.seed),
    ]
    if choice.preset:
        argv += ["--preset", choice.preset]
    for name, value in choice.changed.items():
        argv += ["--set", f"{name}={value}"]
    if choice.against:
        argv.append("--against-full")
    return [*argv, *_fed(choice), "--runs", str(runs_dir), "--progress-json"]


def race_command(
    prompt_file: Path,
    choice: MethodChoice,
    against: Sequence[str],
    runs_dir: Path,
    variants: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """argv that races the chosen method, with its configuration, against others as they come; full KV is in every
    race. variants: (parameter, value) of each further lane of the chosen method, all of one parameter."""
    rivals = [name for name in dict.fromkeys(against) if name not in (choice.method, methods.REFERENCE)]
    own_lanes = 0 if choice.method == methods.REFERENCE else 1 + len(variants)
    names = [choice.method] * own_lanes + rivals
    argv = [sys.executable, "-m", "kvlens", "race", str(prompt_file), "--methods", ",".join(names)]
    argv += ["--model", choice.model, "--budget", choice.budget]
    argv += ["--max-new", str(choice.max_new), "--seed", str(choice.seed)]
    if choice.method != methods.REFERENCE:
        argv += ["--preset", f"{choice.method}:{choice.preset}"] * own_lanes if choice.preset else []
        varied = {name for name, _ in variants}
        settings = [(name, value) for name, value in choice.changed.items() if name not in varied]
        settings += [(name, choice.changed.get(name, "")) for name in varied]
        for name, value in (*settings, *variants):
            argv += ["--set", f"{choice.method}:{name}={value}"]
    return [*argv, *_fed(choice), "--runs", str(runs_dir), "--progress-json"]


def _fed(choice: MethodChoice) -> list[str]:
    """How the prompt is fed, where it is not the usual way."""
    argv = [] if choice.chat == "auto" else ["--chat", choice.chat]
    argv += [] if choice.system is None else ["--system", choice.system]
    argv += [] if choice.question == "in" else ["--question", choice.question]
    argv += ["--turns", "carried"] if choice.carried else []
    return argv + [part for name, value in choice.chat_args.items() for part in ("--chat-arg", as_typed(name, value))]


def as_typed(name: str, value: Any) -> str:
    """Return an argument of the chat template as `kvlens run --chat-arg` reads it."""
    return f"{name}={json.dumps(value, ensure_ascii=False)}"


def pair_command(uid: str, runs_dir: Path) -> list[str]:
    """argv that repeats a run on the tokens of its full-KV reference, so that every step can be compared."""
    return [sys.executable, "-m", "kvlens", "pair", uid, "--forced", "--runs", str(runs_dir), "--progress-json"]


def tip_command(uid: str, runs_dir: Path) -> list[str]:
    """Return the argv that searches for the budget at which a run's answer tips."""
    return [sys.executable, "-m", "kvlens", "tip", uid, "--runs", str(runs_dir), "--progress-json"]


@dataclass(frozen=True)
class TryChoice:
    """What to try on a stored run: pieces to hold exactly resident, what to ask for otherwise, what to look for, pieces
    to drop."""

    pieces: tuple[Piece, ...]
    from_step: int
    changed: tuple[tuple[str, str], ...] = ()
    """(`budget`, a parameter, or `method` with the fair one; its value)"""
    search: str = ""
    """'heads': the smallest set that suffices; 'bytes': what suffices with the fewest; 'bits': the fewest extra bits of
    a quantised run; '': nothing"""
    drops: tuple[Piece, ...] = ()

    def words(self) -> str:
        """'hold span 40 for L2 KV1, from step 3 on, at budget 30%'."""
        if self.search == "bytes":
            words = f"find the fewest bytes that bring it back, held from step {self.from_step} on"
        elif self.search == "bits":
            words = "find the fewest extra bits that bring it back"
        elif self.pieces or self.drops:
            both = [f"{verb} {_in_words(pieces)}" for verb, pieces in self.verbs() if pieces]
            words = f"{' and '.join(both)}, from step {self.from_step} on"
            words = f"find the smallest set of KV heads for which it suffices to {words}" if self.search else words
        else:
            words = "run it"
        return words + "".join(f", at {asked_in_words(*change)}" for change in self.changed)

    def verbs(self) -> tuple[tuple[str, tuple[Piece, ...]], ...]:
        """What is done, as the command's options are called, and to which pieces."""
        return ("hold", self.pieces), ("drop", self.drops)


def _in_words(pieces: tuple[Piece, ...]) -> str:
    return ", ".join(f"{piece.describe_tokens()} for {piece.describe_heads()}" for piece in pieces)


def whatif_command(uid: str, choice: TryChoice, runs_dir: Path) -> list[str]:
    """argv that tries it."""
    argv = [sys.executable, "-m", "kvlens", "whatif", uid]
    for verb, pieces in choice.verbs():
        for piece in pieces:
            argv += [f"--{verb}", str(piece)]
    argv += ["--from-step", str(choice.from_step)]
    for name, value in choice.changed:
        options = {"budget": ["--budget", value], "method": ["--fair"]}
        argv += options.get(name, ["--set", f"{name}={value}"])
    argv += {"heads": ["--search"], "bytes": ["--fewest-bytes"], "bits": ["--fewest-bits"], "": []}[choice.search]
    return [*argv, "--runs", str(runs_dir), "--progress-json"]


def changed_parameters(
    parameters: list[dict[str, Any]], preset: dict[str, Any], values: dict[str, Any]
) -> dict[str, Any]:
    """The entries of `values` that are not what default and preset give already."""
    base = {p["name"]: preset.get(p["name"], p["default"]) for p in parameters}
    return {name: value for name, value in values.items() if value != base[name]}
