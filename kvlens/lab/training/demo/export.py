"""Write a checkpoint as a model folder that transformers reads: fp16 safetensors, tokenizer, provenance."""

import datetime
import hashlib
import json
import os
import platform
import tempfile
from collections import Counter
from pathlib import Path

import tokenizers
import torch
import transformers

from kvlens.lab.training.demo import circuit, english
from kvlens.lab.training.demo.schedule import LEARNING_RATE, PROCESSES, TOKENS_PER_PROCESS, scaled_stages
from kvlens.lab.training.demo.tokenizer import load_tokenizer

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _provenance(state: dict, minutes: float, seed: int, folder: Path) -> dict[str, object]:
    training, held_out = english.split(english.collect())
    origin = Counter(document.name.split()[0] for document in training)
    return {
        "made_by": "kvlens train demo",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": seed,
        "nominal_minutes": minutes,
        "steps": state["step"],
        "steps_planned": sum(stage.steps for stage in scaled_stages(minutes)),
        "tokens": state["tokens"],
        "wall_minutes": round(state["wall"] / 60, 1),
        "cpu_minutes_of_both_processes": round(state["cpu"] / 60, 1),
        "processes": PROCESSES,
        "tokens_per_process_and_step": TOKENS_PER_PROCESS,
        "learning_rate": LEARNING_RATE,
        "stages": [vars(stage) for stage in scaled_stages(minutes)],
        "parameters": sum(tensor.numel() for name, tensor in state["model"].items() if name != "lm_head.weight"),
        "structured_start": {
            "look_back_layer": circuit.LOOK_BACK,
            "match_layers": circuit.MATCH,
            "shifts": circuit.SHIFTS,
        },
        "data": {
            "generated": "kvlens/demo/language.py through kvlens/lab/training/demo/rows.py",
            "real_english": "Python standard library docstrings, pydoc topics, licence texts of the operating system",
            "real_english_documents": dict(origin),
            "real_english_characters": sum(len(p) for document in training for p in document.paragraphs),
            "held_out_documents": [document.name for document in held_out],
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "sha256": {name: sha256(folder / name) for name in FILES},
    }


def export(run: Path, target: Path, minutes: float, seed: int) -> Path:
    """Export the checkpoint (or, without one, the untrained start) of the run folder; files are replaced one by one,
    whole."""
    tokenizer = load_tokenizer(run)
    model = circuit.build_model(len(tokenizer), seed=seed)
    state: dict = {"step": 0, "tokens": 0, "wall": 0.0, "cpu": 0.0, "model": model.state_dict()}
    if (run / "checkpoint.pt").exists():
        state = torch.load(run / "checkpoint.pt", weights_only=True)
    model.load_state_dict(state["model"])
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        model.half().save_pretrained(folder)
        tokenizer.save_pretrained(str(folder))
        text = json.dumps(_provenance(state, minutes, seed, folder), indent=1) + "\n"
        (folder / "provenance.json").write_text(text)
        for file in (*FILES, "provenance.json"):
            os.replace(folder / file, target / file)
    return target
