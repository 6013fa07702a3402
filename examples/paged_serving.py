"""Paged serving with a prefix cache: several requests decode at once, each logs a trace of its own.

As in nano-vllm, a block manager hands out pages of one pool. A whole page is named by a hash of its tokens and of all
tokens before it. A request whose prompt begins as another one's takes those pages instead of computing them. Attention
reads all pages, so nothing is lost: a trace shows which pages are shared, with whom, and the bytes of each request.

    python paged_serving.py MODEL_FOLDER TRACES PROMPT.txt PROMPT.txt ...
    kvlens import TRACES/request-0
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from llama import Llama
from torch import Tensor
from trace_writer import Writer


class Pool:
    """Pages of keys and values [layers, pages, 2, page, KV heads, d], who holds each, and which tokens it has."""

    def __init__(self, model: Llama, pages: int, page: int) -> None:
        self.page, self.page_bytes = page, model.token_bytes * page
        self.store = torch.zeros(model.layers, pages, 2, page, model.kv_heads, model.dim)
        self.holders: list[set[int]] = [set() for _ in range(pages)]
        self.by_hash: dict[int, int] = {}

    def take(self, request: int) -> int:
        """A page that no request holds."""
        place = next(index for index, holders in enumerate(self.holders) if not holders)
        self.by_hash = {name: page for name, page in self.by_hash.items() if page != place}
        self.holders[place].add(request)
        return place

    def share(self, request: int, name: int) -> int | None:
        """The page of a hash, from now on held by the request too; None: no page has it."""
        place = self.by_hash.get(name)
        if place is not None:
            self.holders[place].add(request)
        return place

    @property
    def bytes(self) -> int:
        """Bytes of the pages that requests hold; a shared page counts once."""
        return self.page_bytes * sum(bool(holders) for holders in self.holders)


class Request:
    """One prompt, its table of pages and its trace."""

    def __init__(self, number: int, text: str, model: Llama, pool: Pool, folder: Path) -> None:
        self.number, self.model, self.pool = number, model, pool
        self.ids = model.tokens.encode(text).ids
        self.prompt, self.table, self.hashes, self.cached, self.named = len(self.ids), [], [], 0, 0
        sizes = {"layers": model.layers, "q_heads": model.q_heads, "kv_heads": model.kv_heads, "head_dim": model.dim}
        about = {"method": "prefix cache", "model": "demo", "parameters": {"page": pool.page}, "dtype": "float32"}
        about |= {"token_bytes": model.token_bytes, "device": "cpu", "prompt_text": text, "temperature": 0.0}
        self.writer = Writer(folder / f"request-{number}", engine="paged_serving 1.0", **sizes, **about)
        self.writer.prompt(self.ids, [model.text(token) for token in self.ids])
        self.writer.span(10_000, (self.prompt - 1) // pool.page * pool.page, self.prompt, kind="window")

    @property
    def shared(self) -> list[int]:
        """Numbers of this request's pages that other requests hold too."""
        return [page for page, place in enumerate(self.table) if len(self.pool.holders[place]) > 1]

    def admit(self) -> None:
        """Take the pages of the prefix cache that fit, then compute the rest of the prompt but its last token."""
        page = self.pool.page
        for start in range(0, self.prompt - page, page):
            place = self.pool.share(self.number, self._hash(start))
            if place is None:
                break
            self.table.append(place)
        self.cached, self.named = len(self.table) * page, len(self.table)
        self.forward(self.ids[self.cached : -1], self.cached)

    def forward(self, ids: list[int], start: int) -> tuple[Tensor, np.ndarray]:
        """Logits after the last token, and its attention [layers, query heads, positions]."""
        model, page, end = self.model, self.pool.page, start + len(ids)
        while len(self.table) * page < end:
            self.table.append(self.pool.take(self.number))
        x, heads = model.embed(ids), []
        read = torch.ones(len(ids), end, dtype=torch.bool).tril(start)[None].expand(model.q_heads, -1, -1)
        slots = torch.arange(start, end)
        places = torch.tensor(self.table)[slots // page]
        for layer in range(model.layers):
            q, k, v = model.project(layer, x, start)
            pages = self.pool.store[layer]
            pages[places, 0, slots % page], pages[places, 1, slots % page] = k, v
            k, v = (pages[self.table, each].flatten(0, 1)[:end] for each in (0, 1))
            attended, weights = model.attend(q, k, v, read)
            heads.append(weights[:, -1].numpy())
            x = model.finish(layer, x, attended)
        for number in range(self.named, end // page):
            self.pool.by_hash.setdefault(self._hash(number * page), self.table[number])
        self.named = end // page
        return model.logits(x[-1]), np.stack(heads)

    def _hash(self, start: int) -> int:
        """Name of the page that begins at a token: of its tokens and of all before it."""
        name = hash(
            (self.hashes[start // self.pool.page - 1] if start else 0, *self.ids[start : start + self.pool.page])
        )
        self.hashes[start // self.pool.page :] = [name]
        return name

    def log_pages(self, start: int, stop: int) -> None:
        """A page is a span once it is whole; a shared one names the other requests."""
        for page in range(start, stop):
            sharers = sorted(self.pool.holders[self.table[page]] - {self.number})
            kind = "shared page" if sharers else "page"
            reason = f"Shared with requests {', '.join(map(str, sharers))}." if sharers else "Of this request alone."
            self.writer.span(page, page * self.pool.page, (page + 1) * self.pool.page, kind=kind, reason=reason)

    def step(self, run_start: float) -> bool:
        """Decode one token and log it. False: the output has ended."""
        position = self.prompt - 1 + self.writer.steps
        if self.writer.steps:
            self.log_pages((position - 1) // self.pool.page, position // self.pool.page)
        started, aside = time.perf_counter(), self.writer.spent_s
        logits, weights = self.forward([self.ids[-1]], position)
        took = time.perf_counter() - started - (self.writer.spent_s - aside)
        self.ids.append(int(logits.argmax()))
        held, shared = len(self.table) * self.pool.page_bytes, len(self.shared) * self.pool.page_bytes
        self.writer.attention(weights)
        for name, value in (("shared_bytes", shared), ("pool_bytes", self.pool.bytes)):
            self.writer.row("journal", step=self.writer.steps, name=name, values=[float(value)])
        times = {"t_us": int(1e6 * (started - run_start)), "dur_us": int(1e6 * took)}
        self.writer.step(self.ids[-1], self.model.text(self.ids[-1]), **times, resident_bytes=held, peak_bytes=held)
        return self.ids[-1] != self.model.stop

    def end(self) -> str:
        """Give the pages back and close the trace. Returns the output."""
        for place in self.table:
            self.pool.holders[place].discard(self.number)
        text = self.model.tokens.decode(self.ids[self.prompt :], skip_special_tokens=True)
        self.writer.close(output_text=text, full_kv_bytes=self.model.token_bytes * len(self.ids))
        return text


def serve(model: Llama, texts: list[str], folder: Path, page: int, new: int) -> list[str]:
    """Answer all prompts at once, a token of each in turn. Returns their outputs."""
    pool = Pool(model, 2 * sum(len(model.tokens.encode(text).ids) // page + new for text in texts), page)
    requests = [Request(number, text, model, pool, folder) for number, text in enumerate(texts)]
    for request in requests:
        request.admit()
    for request in requests:  # all are admitted, so that each knows with whom it shares
        request.log_pages(0, (request.prompt - 1) // page)
    outputs, running, run_start = {}, list(requests), time.perf_counter()
    for remaining in reversed(range(new)):
        for request in list(running):
            if not request.step(run_start) or not remaining:
                running.remove(request)
                outputs[request.number] = request.end()
    return [outputs[number] for number in range(len(texts))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "traces"):
        parser.add_argument(name, type=Path)
    parser.add_argument("prompts", type=Path, nargs="+")
    for name, value in (("--page", 16), ("--new", 12)):
        parser.add_argument(name, type=int, default=value)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    for output in serve(
        Llama(options.model), [p.read_text() for p in options.prompts], options.traces, options.page, options.new
    ):
        print(output)
