"""What a made-up run lost against a made-up full-KV run: full attention by span, the loss of each step, and effects.
See ``synthetic.py``."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlens.instruments import Effects, Loss, Oracle, SpanKeys
from tests.synthetic.scene import ANSWER, Scene

_LOST_FOR = 4
"""how many steps around the step of loss the needle is missed"""
_EFFECTS = 6
"""how many triples have an effect"""


class LensMaker:
    """Full attention and losses of a made-up run, with random numbers of its own.

    loss_step: the first step at which the two runs disagree; forced: losses go on after it. sampling: steps and layers
    with full attention, as in the run's meta, None for none.
    """

    def __init__(self, scene: Scene, seed: int, loss_step: int, forced: bool, sampling: dict[str, Any] | None) -> None:
        self.scene, self.loss_step, self.forced, self.sampling = scene, loss_step, forced, sampling
        self._rng, self._seed = np.random.default_rng((seed, 1)), seed
        self.effects: list[Effects] = []
        """of the step of loss, once it was made, where full attention is known of it"""

    def full(self, step: int, mass: np.ndarray, coarse: np.ndarray, needle: int) -> np.ndarray:
        """Full attention's mass [L, Hq, S] beside the method's: as it is but for spans read as a summary, which get
        more or less.

        coarse: bool [L, Hq, S]. Around the step of loss every third query head of the deeper layers would have read the
        needle.
        """
        gain = np.where(coarse, np.exp(self._rng.normal(0.1, 0.35, mass.shape)), 1.0)
        full, depth = mass * gain, np.arange(len(mass)) / len(mass)
        near = float(np.exp(-((step - self.loss_step) ** 2) / (2 * _LOST_FOR)))
        lost = coarse[..., needle] & (depth[:, None] >= 0.5) & (np.arange(mass.shape[1]) % 3 == 0)
        full[..., needle] += np.where(lost, near * (1.5 + 0.5 * depth[:, None]), 0.0)
        return (full / full.sum(-1, keepdims=True)).astype(np.float32)

    def oracle(
        self, step: int, full: np.ndarray, mass: np.ndarray, top_k: int
    ) -> tuple[Oracle | None, dict[str, np.ndarray]]:
        """The top K by full mass, and the columns regret and unread [L, Hq], in total, NaN in layers that are not
        sampled. A twentieth of the regret lies on the first token of the listed span missed most, read in no form."""
        layers = self._sampled(step, len(mass))
        regret = np.where(layers[:, None], np.maximum(full - mass, 0).sum(-1), np.nan).astype(np.float32)
        columns: dict[str, np.ndarray] = {"regret": regret, "unread": regret / np.float32(20)}
        if not layers.any():
            return None, columns
        if step == self.loss_step:
            self.effects = [self._effects(step, np.where(layers[:, None, None], np.maximum(full - mass, 0), 0))]
        top = np.argsort(-full, axis=-1, kind="stable")[..., :top_k].astype(np.int32)
        listed, read = (np.take_along_axis(values, top, -1) for values in (full, mass))
        tail = np.where(layers[:, None], np.maximum(1 - listed.sum(-1), 0), np.nan).astype(np.float32)
        worst = np.argmax(listed - read, axis=-1)[..., None]
        lost = np.nan_to_num(columns["unread"])[..., None]
        unread = np.zeros_like(read)
        np.put_along_axis(unread, worst, lost, -1)
        starts = np.array([span.tok_start for span in self.scene.spans], np.int32)
        first = starts[np.take_along_axis(top, worst, -1)]
        first[~layers], top[~layers] = -1, -1
        return Oracle(top, listed, read, tail, unread, first, lost), columns

    def _effects(self, step: int, missed: np.ndarray) -> Effects:
        """missed: float [L, Hq, S]. What was missed most has an effect, more or less."""
        rng, lead = np.random.default_rng((self._seed, 3)), 1.5
        shares = missed.reshape(len(missed), self.scene.kv_heads, -1, missed.shape[-1]).mean(2)
        most = np.argsort(-shares, axis=None, kind="stable")[:_EFFECTS]
        most = most[shares.flat[most] > 0]
        effect = (lead * shares.flat[most] * rng.uniform(0.2, 1.0, len(most))).astype(np.float32)
        most = most[order := np.argsort(-effect)]
        layer, kv_head, span = (ids.astype(np.int32) for ids in np.unravel_index(most, shares.shape))
        return Effects(step, lead, layer, kv_head, span, effect[order])

    def _sampled(self, step: int, layers: int) -> np.ndarray:
        chosen = np.zeros(layers, bool)
        if self.sampling is not None and step % self.sampling["every"] == 0:
            chosen[self.sampling["layers"]] = True
        return chosen

    def loss(self, step: int, regret: np.ndarray) -> Loss | None:
        """The loss of a step, larger where more was missed; None once the contexts differ."""
        if step > self.loss_step and not self.forced:
            return None
        rng = self._rng
        agrees = step != self.loss_step and not (step > self.loss_step and rng.random() < 0.2)
        missed = float(np.nan_to_num(regret).max())
        kl = float(rng.gamma(1.5, 0.004) + 0.02 * missed) if agrees else float(0.8 + rng.gamma(2.0, 0.3) + missed)
        reference, other = step % len(ANSWER), (step + 7) % len(ANSWER)
        top = reference if agrees else other
        before = -float(rng.gamma(1.2, 0.1))
        drop = kl if agrees else kl + 1.0
        return Loss(
            1000 + reference,
            " " + ANSWER[reference],
            1000 + top,
            " " + ANSWER[top],
            agrees,
            kl,
            before,
            before - drop,
            -1.5 * drop,
            0 if agrees else int(rng.integers(1, 6)),
        )


def span_keys(scene: Scene, seed: int) -> SpanKeys:
    """Mean keys of the prompt's spans in a few groups, so that a projection shows some."""
    rng = np.random.default_rng((seed, 2))
    spans = np.array([span.span for span in scene.spans], np.int32)
    size = (scene.layers, scene.kv_heads, len(spans), scene.head_dim)
    middles = rng.normal(0, 2, (scene.layers, scene.kv_heads, 4, scene.head_dim))
    keys = rng.normal(0, 0.6, size) + middles[:, :, rng.integers(0, 4, len(spans))]
    return SpanKeys("pre-rope", spans, keys.astype(np.float32))
