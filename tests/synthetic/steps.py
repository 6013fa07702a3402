"""The decode steps of a made-up run: interest that wanders over spans, zooms, copies. See ``synthetic.py``."""

from __future__ import annotations

import numpy as np

from kvlens.decisions import Decisions
from kvlens.instruments import CutRow, Scores
from kvlens.records import StepRecord
from kvlens.rows import EventRow, JournalRow, SpanHeadRow, SpanRow, TransferRow
from tests.synthetic.lens import LensMaker
from tests.synthetic.scene import ANSWER, LEAVE, WINDOW, Scene, resident_bytes, span_heads

_ZOOM_IN, _ZOOM_OUT, _MAX_ZOOMED = 0.08, 0.04, 4
#: Spans listed per ranking.
_LISTED = 12


def cut(step: int, score: np.ndarray) -> CutRow:
    """One token of span 1 given up at every step, the lowest of nine by its score."""
    one = np.ones(1, np.int32)
    low = float(score[0, 0, 1])
    return CutRow(step, 0, None, 9, 8, low + 0.1, one, one, one * step, one * 9, np.array([low], np.float32))


def journal(step: int, score: np.ndarray, zoomed: np.ndarray) -> list[JournalRow]:
    """What a method might say of a step: a number for all layers, one per layer, and a vector with gaps. [L, H_kv,
    spans]."""
    each = [JournalRow(step, layer, None, "best_score", np.array([score[layer].max()])) for layer in range(len(score))]
    counts = zoomed.sum(-1).astype(np.float32).reshape(-1)
    vector = np.where(counts > 0, counts, np.nan)
    return [
        JournalRow(step, None, None, "threshold", np.array([_ZOOM_IN])),
        *each,
        JournalRow(step, None, None, "expanded", vector),
    ]


def phases(dur: int, wait: int) -> dict[str, int]:
    """Phases of a step that took `dur`, us."""
    parts = {"score": 4, "plan": 3, "copy": 2, "wait": wait, "attend": 6, "record": 2}
    return parts | {"rest": dur - sum(parts.values())}


def zooms(head: dict[str, np.ndarray], group: int) -> Decisions:
    """A zoom per query head; where a query head asks for more than it was granted, span 1 is refused."""
    layer, q_head = (place.ravel() for place in np.indices(head["n_zoomed"].shape))
    refused = head["zoom_refused"].ravel().astype(np.int32)
    columns: dict[str, np.ndarray | float] = {"layer": layer, "kv_head": q_head // group, "q_head": q_head}
    columns |= {"requested": head["zoom_asked"].ravel(), "granted": head["n_zoomed"].ravel(), "refused": refused}
    columns |= {"score": _ZOOM_IN, "cut": _ZOOM_OUT, "refused_span": np.ones(refused.sum())}
    return Decisions.filled(len(layer), "zoom", "spans", columns)


def ranking(score: np.ndarray, zoomed: np.ndarray, candidate: np.ndarray) -> Scores:
    """The best spans per KV head. `score`, `zoomed`: [L, H_kv, spans]; `candidate`: [spans], those that can be
    expanded."""
    order = np.argsort(np.where(candidate, -score, np.inf), axis=-1, kind="stable")[
        ..., : min(_LISTED, int(candidate.sum()))
    ]
    count = np.full(score.shape[:2], candidate.sum(), np.int32)
    return Scores(
        order.astype(np.int32), np.take_along_axis(score, order, -1), np.take_along_axis(zoomed, order, -1), count
    )


class StepMaker:
    """Makes records in order; holds what one step leaves to the next."""

    def __init__(self, scene: Scene, n_prompt: int, top_k: int, clock_us: int, lens: LensMaker | None) -> None:
        self.lens = lens
        self.scene, self.n_prompt, self.top_k, self.clock = scene, n_prompt, top_k, clock_us
        count = len(scene.spans)
        self.taste = scene.rng.normal(0, 0.7, (scene.layers, scene.q_heads, count)).astype(np.float32)
        self.drift = np.zeros_like(self.taste)
        self.zoomed = np.zeros((scene.layers, scene.kv_heads, count), bool)
        entropy = [span.span for span in scene.spans if span.kind == "entropy"]
        self.needle = entropy[len(entropy) // 3]
        self.cold = 0

    def make(self, step: int) -> StepRecord:
        """The record of one step."""
        scene, rng = self.scene, self.scene.rng
        group = scene.q_heads // scene.kv_heads
        born, born_heads, transfers, events = self._leave_window(step)
        mass = self._masses(step)
        score = mass.reshape(scene.layers, scene.kv_heads, group, -1).max(2)
        before = self.zoomed
        self.zoomed = self._zoom(score, before)
        came, went = self.zoomed & ~before, before & ~self.zoomed
        cold_size = np.array([scene.cold[s.span].cold_bytes if s.span in scene.cold else 0 for s in scene.spans])
        lengths = np.array([s.tok_end - s.tok_start for s in scene.spans])
        dur = int(rng.integers(8_000, 11_000))
        now, wait = self.clock + 400, 0
        grouped = mass.reshape(scene.layers, scene.kv_heads, group, -1)
        for layer, head, span in zip(*(axis.tolist() for axis in np.nonzero(came)), strict=True):
            q_head = head * group + int(grouped[layer, head, :, span].argmax())
            took = 15 + int(cold_size[span]) // 4000
            transfers.append(
                TransferRow(
                    step, layer, head, span, "h2d", "zoom", int(cold_size[span]), now, now + took, took // 2, True
                )
            )
            events.append(
                EventRow(step, layer, head, q_head, "zoom_in", span, float(grouped[layer, head, :, span].max()))
            )
            now, wait = now + took, wait + took // 2
        for layer, head, span in zip(*(axis.tolist() for axis in np.nonzero(went)), strict=True):
            events.append(EventRow(step, layer, head, None, "zoom_out", span, float(score[layer, head, span])))
        up = (came * cold_size).sum(-1).astype(float)
        resident = resident_bytes(scene, self.n_prompt + step + 1, (self.zoomed * lengths).sum(-1))
        down = np.full_like(up, sum(t.bytes for t in transfers if t.cause == "leave") / up.size)
        head, oracle, loss = self._head_columns(mass), None, None
        if self.lens is not None:
            read_exactly, summarised = self._reading()
            full = self.lens.full(step, mass, summarised, self.needle)
            oracle, missed = self.lens.oracle(step, full, mass, self.top_k)
            head |= missed
            head["coverage"] = (full * read_exactly).sum(-1)
            loss = self.lens.loss(step, head["regret"])
        coarse = sum(s.kind == "entropy" for s in scene.spans)
        tokens = {
            "recalled_tokens": (came * lengths).sum(-1),
            "reused_tokens": ((self.zoomed & before) * lengths).sum(-1),
        }
        kv = {
            "h2d_bytes": up,
            "d2h_bytes": down,
            "resident_bytes": resident,
            "attended_tokens": np.rint(resident / scene.token_bytes()) - coarse,
            "attended_coarse": (coarse - self.zoomed.sum(-1)).astype(float),
            "blocking_bytes": up,
            "read_bytes": resident * 0.5,
            "ideal_bytes": up,
            "similarity": np.clip(rng.normal(0.86, 0.08, up.shape), -1, 1),
            **{name: count.astype(float) for name, count in tokens.items()},
            "n_recalled": came.sum(-1).astype(float),
            "n_reused": (self.zoomed & before).sum(-1).astype(float),
        }
        top = np.argsort(-mass, axis=-1)[..., : self.top_k].astype(np.int32)
        top_mass = np.take_along_axis(mass, top, -1)
        if top.shape[-1] < self.top_k:
            pad = [(0, 0), (0, 0), (0, self.top_k - top.shape[-1])]
            top, top_mass = np.pad(top, pad, constant_values=-1), np.pad(top_mass, pad)
        tail = np.maximum(1 - top_mass.sum(-1), 0).astype(np.float32)
        self.cold = sum(row.cold_bytes for row in scene.cold.values()) * scene.layers * scene.kv_heads
        record = StepRecord(
            step=step,
            t_us=self.clock,
            dur_us=dur + wait,
            wait_us=wait,
            record_us=60,
            token_id=1000 + step % len(ANSWER),
            text=" " + ANSWER[step % len(ANSWER)],
            logprob=-float(rng.gamma(1.2, 0.5)),
            next_entropy=float(rng.gamma(1.5, 0.8)),
            resident_bytes=int(resident.sum()),
            peak_bytes=int(resident.sum() + up.max()),
            cold_bytes=self.cold,
            head=head,
            kv=kv,
            top_span=top,
            top_mass=top_mass,
            tail_mass=tail,
            transfers=transfers,
            events=events,
            spans=born,
            span_heads=born_heads,
            journal=journal(step, score, self.zoomed),
            cuts=[cut(step, score)],
            scores=ranking(score, self.zoomed, np.array([s.kind == "entropy" for s in scene.spans])),
            loss=loss,
            oracle=oracle,
            phases=phases(dur + wait, wait),
            decisions=zooms(head, scene.q_heads // scene.kv_heads),
        )
        self.clock += dur + wait
        return record

    def _leave_window(self, step: int) -> tuple[list[SpanRow], list[SpanHeadRow], list[TransferRow], list[EventRow]]:
        """Once the window has grown by LEAVE tokens, its oldest become an entropy span in the cold tier."""
        scene = self.scene
        covered = max((s.tok_end for s in scene.spans if s.kind == "entropy"), default=self.n_prompt - WINDOW)
        if self.n_prompt + step + 1 - covered <= WINDOW + LEAVE:
            return [], [], [], []
        row = SpanRow(
            len(scene.spans),
            "entropy",
            covered,
            covered + LEAVE,
            step,
            f"The {LEAVE} oldest tokens of the window, left at step {step}.",
            float(scene.rng.gamma(2.0, 1.0)),
            "coarse",
        )
        scene.spans.append(row)
        heads = span_heads(scene, row)
        shape = (scene.layers, scene.q_heads, 1)
        self.taste = np.concatenate([self.taste, scene.rng.normal(0, 0.7, shape).astype(np.float32)], -1)
        self.drift = np.concatenate([self.drift, np.zeros(shape, np.float32)], -1)
        self.zoomed = np.concatenate([self.zoomed, np.zeros((scene.layers, scene.kv_heads, 1), bool)], -1)
        size = LEAVE * scene.token_bytes() * scene.kv_heads
        moves = [
            TransferRow(
                step,
                layer,
                None,
                row.span,
                "d2h",
                "leave",
                size,
                self.clock + 30 * layer,
                self.clock + 30 * layer + 25,
                0,
                False,
            )
            for layer in range(scene.layers)
        ]
        events = [
            EventRow(step, None, None, None, "span_open", row.span),
            EventRow(step, None, None, None, "offload", row.span),
        ]
        return [row], heads, moves, events

    def _masses(self, step: int) -> np.ndarray:
        """Attention mass of every span for every query head; adds up to 1."""
        scene = self.scene
        self.drift = 0.92 * self.drift + scene.rng.normal(0, 0.35, self.drift.shape).astype(np.float32)
        sizes = np.array([s.tok_end - s.tok_start for s in scene.spans], np.float32)
        logits = self.taste + self.drift + 0.5 * np.log(sizes) - 1.0
        logits[..., 0] += 3.0
        window = next(i for i, s in enumerate(scene.spans) if s.kind == "window")
        logits[..., window] += 2.0
        logits[:, ::3, self.needle] += 3.5 * np.exp(-(((step % 40) - 14) ** 2) / 30)
        logits -= logits.max(-1, keepdims=True)
        weights = np.exp(1.5 * logits)
        return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)

    def _zoom(self, score: np.ndarray, before: np.ndarray) -> np.ndarray:
        entropy = np.array([s.kind == "entropy" for s in self.scene.spans])
        wanted = entropy & ((score > _ZOOM_IN) | (before & (score > _ZOOM_OUT)))
        ranked = np.where(wanted, score, 0)
        floor = np.sort(ranked, -1)[..., -min(_MAX_ZOOMED, ranked.shape[-1])]
        return wanted & (ranked >= np.maximum(floor, 1e-9)[..., None])

    def _reading(self) -> tuple[np.ndarray, np.ndarray]:
        """bool [L, Hq, S]: which spans each query head reads exactly, and which as a summary."""
        scene = self.scene
        zoomed = np.repeat(self.zoomed, scene.q_heads // scene.kv_heads, axis=1)
        entropy = np.array([s.kind == "entropy" for s in scene.spans])
        factors = np.array([s.span in scene.cold and scene.cold[s.span].form == "factors" for s in scene.spans])
        return ~entropy | (zoomed & ~factors), entropy & ~zoomed

    def _head_columns(self, mass: np.ndarray) -> dict[str, np.ndarray]:
        scene, rng = self.scene, self.scene.rng
        kinds = np.array([s.kind for s in scene.spans])
        factors = np.array([s.span in scene.cold and scene.cold[s.span].form == "factors" for s in scene.spans])
        zoomed = np.repeat(self.zoomed, scene.q_heads // scene.kv_heads, axis=1)
        total = {name: mass[..., kinds == name].sum(-1) for name in ("sink", "anchor", "window")}
        entropy = kinds == "entropy"
        exact = (mass * (zoomed & ~factors)).sum(-1)
        rebuilt = (mass * (zoomed & factors)).sum(-1)
        coarse = (mass * (entropy & ~zoomed)).sum(-1)
        n_zoomed = (zoomed & (mass > _ZOOM_OUT)).sum(-1).astype(np.float32)
        logs = np.log(np.maximum(mass, 1e-12))
        return {
            "mass_sink": total["sink"],
            "mass_anchor": total["anchor"],
            "mass_window": total["window"],
            "mass_resident": exact,
            "mass_coarse": coarse,
            "mass_reconstructed": rebuilt,
            "mass_mean": np.zeros_like(coarse),
            "mass_quantised": np.zeros_like(coarse),
            "entropy": -(mass * logs).sum(-1),
            "qcos": np.clip(rng.normal(0.86, 0.08, coarse.shape), -1, 1).astype(np.float32),
            "n_zoomed": n_zoomed,
            "zoom_rate": n_zoomed / max(int(entropy.sum()), 1),
            "zoom_asked": n_zoomed + (n_zoomed > 1),
            "zoom_refused": (n_zoomed > 1).astype(np.float32),
        }
