"""SCBench files (one task a file: scbench_kv.jsonl, ...): several questions on one context, each a prompt of its own,
those of a context one behind the other. With `--question after` they begin with the same tokens, which are read once.

`@turns=earlier`, the default: a question stands behind the questions before it and their reference answers, all of them
behind the context. That is the multi-turn mode, "the default mode of our SCBench" (scbench/readme.md), with the right
answers in the history, as its args.py has it unless --disable_golden_context is given. `@turns=alone`: each question
stands behind the context by itself, its multi-request mode (--same_context_different_query). The model's own answers in
the history are not had here: a prompt is known before anything is run.

File names, fields (context, of some files input; multi_turns with input, answer, options; task, name, repo where a file
mixes two tasks or is code) and tokens to generate are taken from github.com/microsoft/MInference, scbench/eval_utils.py
and run_scbench.py, metrics from compute_scores.py: kv, kv_hard, kv_compressible, prefix_suffix, hashhop: the value
stands in the output; passkey: the first whole number; mf: the first number; vt: RULER's string_match_all; many_shot,
qa_eng: an answer stands in the output; qa_chn: F1 of characters; choice_eng: InfiniteBench's letter; summary:
ROUGE-Lsum; repoqa: pass@1 at a similarity of 0.8; summary_with_needles and repoqa_and_kv: by each turn's own task.

Differences: all turns of a line are asked (there at most --max_turns, 5). In the chat form context and turns are one
message of the user (there a message each), so that the context stays a prefix and a character of the text keeps its
place. A right option is said with its letter, which is what is asked for (there without). Instructions around a text
are ours: figures can be compared between methods, not with published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvlens.lab.tasks import infinite_metrics as infinite
from kvlens.lab.tasks import scbench_metrics as metrics
from kvlens.lab.tasks.filerows import unpacked
from kvlens.lab.tasks.filetask import FileTask, Posed, texts
from kvlens.refusal import Refusal
from kvlens.tasks.base import Generation

JSON = "Below is a JSON object. You will be asked for the values of some of its keys.\n\n"
BOOK = "Read this book, then answer the question about it briefly.\n\n"
CODE = "Read this code. You will be asked for one of its functions: repeat it exactly, in a code block between ```.\n\n"
Metric = Callable[[str, Sequence[str]], float]
TASKS: dict[str, tuple[Metric | None, int, str]] = {
    "choice_eng": (infinite.choice, 40, BOOK),
    "qa_eng": (metrics.any_name, 40, BOOK),
    "qa_chn": (infinite.question_zh, 40, "阅读这本书，然后简短地回答问题。\n\n"),
    "kv": (metrics.contains, 150, JSON),
    "kv_hard": (metrics.contains, 150, JSON),
    "kv_compressible": (metrics.contains, 150, "You will be asked for values that this text gives to some keys.\n\n"),
    "prefix_suffix": (metrics.contains, 150, ""),
    "hashhop": (metrics.contains, 150, ""),
    "passkey": (infinite.first_number, 15, "A pass key is hidden in this text. Remember it.\n\n"),
    "mf": (metrics.find_number, 5, ""),
    "vt": (metrics.string_match_all, 30, ""),
    "many_shot": (metrics.any_name, 10, ""),
    "summary": (infinite.rouge_lsum, 200, ""),
    "repoqa": (None, 1024, CODE),
    "summary_with_needles": (None, 800, ""),
    "repoqa_and_kv": (None, 1024, ""),
}
"""task -> (metric, None: by the turn; tokens to generate; what stands before the context)"""
MIXED = {"summary_with_needles": {"summary": 800, "passkey": 15}, "repoqa_and_kv": {"repoqa": 1024, "kv": 80}}
"""files of two tasks: the tasks of their turns and the tokens to generate for each"""
PREFIXES = ("scbench_", "multi_turn_")
"""of file names and of the turns' tasks; the second is an older one"""
LETTERS = "ABCD"
TURNS = ("earlier", "alone")


class SCBench(FileTask):
    """One task of SCBench, known by the name of the file or its folder."""

    fields: Mapping[str, type] = {"multi_turns": list}
    parameters: ClassVar[Mapping[str, int | str]] = {"turns": TURNS[0]}

    def __init__(self, path: Path, turns: str = TURNS[0]) -> None:
        if turns not in TURNS:
            raise Refusal(
                f"the parameter 'turns' of scbench is {' or '.join(TURNS)}, not '{turns}'.",
                code="not_a_choice",
                parameter="turns",
                choices=TURNS,
            )
        self.turns = turns
        known_values = (_plain(name) for name in (unpacked(path).stem, path.parent.name))
        self.task = next((name for name in known_values if name in TASKS), "")
        if not self.task:
            names = ", ".join(f"{PREFIXES[0]}{name}" for name in TASKS)
            raise Refusal(f"the name of '{path.name}' is none of SCBench's tasks: {names}.", code="task_unknown")
        super().__init__(path)
        self._turns = [
            (index, turn) for index, (_, line) in enumerate(self.lines) for turn in range(len(line["multi_turns"]))
        ]
        self.items = len(self._turns)
        self._functions: dict[Any, list[tuple[str, str]]] = {}
        for _, line in self.lines:
            request = [turn for turn in line["multi_turns"] if self._kind(turn) == "repoqa"]
            self._functions.setdefault(line.get("repo"), []).extend((turn["name"], turn["answer"]) for turn in request)
        metric, self.new_tokens, _ = TASKS[self.task]
        self.summary = f"SCBench, {self.task}, each turn {'alone' if turns == 'alone' else 'behind the earlier ones'}"
        self.metric = f"SCBench's {metric.__name__.replace('_', ' ') if metric else 'metric of each turn'}"

    def check(self, number: int, line: dict[str, Any]) -> None:
        if not isinstance(_context(line), str) or not _context(line).strip():
            raise self.wrong(number, "lacks the field 'context'")
        if not line["multi_turns"]:
            raise self.wrong(number, "has an empty list 'multi_turns'")
        for index, turn in enumerate(line["multi_turns"], 1):
            problem = self._problem(turn)
            if problem:
                raise self.wrong(number, f"has a turn {index} that {problem}")
            if self._kind(turn) == "repoqa" and not isinstance(line.get("repo"), str):
                raise self.wrong(number, "lacks the field 'repo'")

    def _problem(self, turn: Any) -> str:
        """What is wrong with a turn; '' for nothing."""
        if not isinstance(turn, dict) or not isinstance(turn.get("input"), str) or not turn["input"].strip():
            return "lacks the field 'input'"
        if turn.get("answer") in (None, "", []):
            return "lacks the field 'answer'"
        if self.task in MIXED and self._kind(turn) not in MIXED[self.task]:
            return f"lacks a field 'task' that is one of {', '.join(PREFIXES[0] + name for name in MIXED[self.task])}"
        kind = self._kind(turn)
        if kind == "choice_eng":
            options = turn.get("options")
            if not isinstance(options, list) or len(options) != len(LETTERS):
                return "lacks the field 'options' with its four entries"
            if turn["answer"] not in options:
                return "has an answer that is none of its options"
        if kind == "repoqa" and not (isinstance(turn.get("name"), str) and isinstance(turn["answer"], str)):
            return "lacks the field 'name'"
        return "" if kind != "mf" or _number(_answers(turn)[0]) else "has an answer that is not a number"

    def _kind(self, turn: Mapping[str, Any]) -> str:
        """The task of a turn."""
        return _plain(str(turn.get("task") or "")) if self.task in MIXED else self.task

    def generation(self, index: int = 0) -> Generation:
        position, number = self._turns[index]
        kind = self._kind(self.lines[position][1]["multi_turns"][number])
        return Generation(MIXED.get(self.task, {}).get(kind, self.new_tokens))

    def ask(self, line: dict[str, Any]) -> Posed:
        return self._posed(line, 0)

    def pose(self, index: int) -> Posed:
        position, number = self._turns[index]
        return self._posed(self.lines[position][1], number)

    def _posed(self, line: dict[str, Any], number: int) -> Posed:
        turns = line["multi_turns"]
        turn = turns[number]
        kind, answers = self._kind(turn), _answers(turn)
        facts: dict[str, Any] = {"kind": kind}
        if kind == "choice_eng":
            answers = (LETTERS[turn["options"].index(turn["answer"])], *answers)
        if kind == "repoqa":
            facts |= {"name": turn["name"], "functions": self._functions[line["repo"]]}
        together = tuple(self._behind(turns, counterpart) for counterpart in range(len(turns)))
        opening = "The letter of the right answer is" if kind == "choice_eng" else ""
        cue = "\nAnswer:" if kind in ("choice_eng", "qa_eng") else ""
        context = TASKS[self.task][2] + _context(line)
        return Posed(context, answers, facts, together[number], cue, opening, together)

    def _behind(self, turns: Sequence[Mapping[str, Any]], number: int) -> str:
        """What stands behind the context where turn `number` is asked."""
        earlier = turns[:number] if self.turns == "earlier" else ()
        return "".join(self._question(turn) + self._write_answer(turn) for turn in earlier) + self._question(
            turns[number]
        )

    def _write_answer(self, turn: Mapping[str, Any]) -> str:
        """A turn's reference answer, as it stands behind its question."""
        sentence = ", ".join(_answers(turn))
        if self._kind(turn) == "choice_eng":
            sentence = f"{LETTERS[turn['options'].index(turn['answer'])]}. {sentence}"
        return sentence if turn["input"][-1].isspace() else f"\n{sentence}" if "\n" in sentence else f" {sentence}"

    def _question(self, turn: Mapping[str, Any]) -> str:
        kind, request = self._kind(turn), turn["input"]
        if kind == "choice_eng":
            options = "\n".join(
                f"{letter}. {sentence}" for letter, sentence in zip(LETTERS, turn["options"], strict=True)
            )
            return f"\n\nQuestion: {request}\n{options}\nAnswer:"
        if kind == "qa_eng":
            return f"\n\nQuestion: {request}\nAnswer:"
        return f"\n\n问题：{request}\n答案：" if kind == "qa_chn" else f"\n\n{request}"

    def measure(self, output: str, answers: tuple[str, ...], facts: Mapping[str, Any]) -> float:
        kind = facts.get("kind", self.task)
        metric = TASKS[kind][0]
        if metric is not None:
            return metric(output, answers)
        if kind == "repoqa":
            return metrics.found_function(output, facts.get("name", ""), facts.get("functions", [("", answers[0])]))
        raise ValueError(
            f"a prompt of '{self.path.name}' is scored by its turn's own task, which the answer does not say."
        )


def _plain(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _context(line: Mapping[str, Any]) -> Any:
    return line["context"] if line.get("context") is not None else line.get("input")


def _answers(turn: Mapping[str, Any]) -> tuple[str, ...]:
    return texts(turn["answer"]) if isinstance(turn["answer"], list) else (str(turn["answer"]),)


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
