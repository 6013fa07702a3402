"""A decoder with a paged cache and top-k page selection, which logs a trace of the open format.

It imports nothing of kvlens: trace_writer.py is a copy of kvlens/trace/writer.py. Host memory holds all pages. The
device has room for `--pages` of them per layer and KV head, beside the first page and the open page. Quest's bound
ranks the pages. A second cache, full KV, is fed the same tokens: it shows what the selection lost.

    python paged_decoder.py MODEL_FOLDER PROMPT.txt TRACE --answer " 4821" --pages 4
    kvlens import TRACE
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from llama import Llama
from torch import Tensor
from trace_writer import Writer

WINDOW = 10_000
"""span of the open page"""


class PagedCache:
    """Keys and values of one request. room: pages on the device per layer and KV head; None: full KV."""

    def __init__(self, model: Llama, page: int, room: int | None) -> None:
        self.model, self.page, self.room = model, page, room
        empty = torch.empty(0, model.kv_heads, model.dim)
        self.keys, self.values = [empty] * model.layers, [empty] * model.layers
        self.slots = torch.zeros(model.layers, model.kv_heads, room or 0, 2, page, model.dim)
        self.hot: list[list[set[int]]] = [[set() for _ in range(model.kv_heads)] for _ in range(model.layers)]

    def forward(self, ids: list[int], log: "Log | None" = None) -> Tensor:
        """Logits after the last token."""
        model, start = self.model, len(self.keys[0])
        x = model.embed(ids)
        for layer in range(model.layers):
            q, k, v = model.project(layer, x, start)
            k, v = torch.cat((self.keys[layer], k)), torch.cat((self.values[layer], v))
            self.keys[layer], self.values[layer] = k, v
            causal = torch.ones(len(ids), len(k), dtype=torch.bool).tril(start)[None].expand(model.q_heads, -1, -1)
            selects = self.room is not None and len(ids) == 1
            attended, weights = model.attend(q, k, v, self.select(layer, q[0], log) if selects else causal)
            if log is not None:
                log.attention(weights[:, 0], lambda q=q, k=k, v=v, all=causal: model.attend(q, k, v, all)[1][:, 0])
            x = model.finish(layer, x, attended)
        return model.logits(x[-1])

    def select(self, layer: int, q: Tensor, log: "Log | None") -> Tensor:
        """Rank the closed pages for each KV head and recall the best. Returns what the heads read."""
        n, group, room = len(self.keys[layer]), self.model.group, self.room or 0
        closed = (n - 1) // self.page
        pages = self.keys[layer][: closed * self.page].unflatten(0, (closed, self.page))
        q = q.unflatten(0, (-1, group))
        bound = torch.maximum(q * pages.amax(1)[:, :, None], q * pages.amin(1)[:, :, None]).sum(-1)
        scores = bound.amax(-1).T[:, 1:]  # [KV heads, pages behind the first one, which is always read]
        best = scores.argsort(-1, descending=True)[:, :room]
        read = torch.zeros(len(scores), n, dtype=torch.bool)
        read[:, : self.page] = read[:, closed * self.page :] = True
        for head, best_pages in enumerate((best + 1).tolist()):
            for slot, page in enumerate(best_pages):
                tokens = slice(page * self.page, (page + 1) * self.page)
                pair = self.keys[layer][tokens, head], self.values[layer][tokens, head]
                self.slots[layer, head, slot] = torch.stack(pair)
                read[head, tokens] = True
            if log is not None:
                log.selection(
                    layer, head, self.hot[layer][head], best_pages, scores[head, best[head]].tolist(), closed - 1
                )
            self.hot[layer][head] = set(best_pages)
        return read.repeat_interleave(group, 0)[:, None]


class Log:
    """The trace of one request: a page is a span, recalls and releases say where it is."""

    def __init__(self, writer: Writer, model: Llama, page: int, prompt: int) -> None:
        self.writer, self.model, self.page, self.closed, self.aside_s = writer, model, page, 0, 0.0
        writer.span(0, 0, page, kind="sink", reason="The first page stays on the device.")
        writer.span(WINDOW, (prompt - 1) // page * page, prompt, kind="window", reason="The open page.")
        self.begin(prompt - 1)

    def begin(self, position: int) -> None:
        """Begin the step that writes a position. Pages that are whole by now are in host memory."""
        for page in range(self.closed + 1, position // self.page):
            whole = {"state": "cold", "reason": f"A page of {self.page} tokens."}
            self.writer.span(page, page * self.page, (page + 1) * self.page, **whole)
            self.closed = page
        self.read: list[np.ndarray] = []
        self.full: list[np.ndarray] = []
        self.moved = np.zeros((self.model.layers, self.model.kv_heads))

    def attention(self, weights: Tensor, full: object) -> None:
        start_time = time.perf_counter()  # full attention is computed for the trace alone
        self.read.append(weights.numpy())
        self.full.append(full().numpy())
        self.aside_s += time.perf_counter() - start_time

    def selection(self, layer: int, head: int, hot_pages: set, pages: list, scores: list, candidates: int) -> None:
        place = {"step": self.writer.steps, "layer": layer, "kv_head": head}
        size = 2 * self.page * self.model.dim * 4
        for page in sorted(hot_pages.difference(pages)):
            self.writer.row("event", kind="release", span=page, **place)
        for page in sorted(set(pages) - hot_pages):
            self.writer.row("event", kind="recall", span=page, value=float(size), **place)
            self.moved[layer, head] += size
        self.writer.row(
            "kv_span", span=pages, score=scores, chosen=[True] * len(pages), n_candidates=candidates, **place
        )


def decode(model: Llama, text: str, folder: Path, page: int, room: int, new: int, **about: object) -> str:
    """Answer a prompt under page selection and write the trace. about: answer, needle. Returns the output."""
    encoding = model.tokens.encode(text)
    ids, characters = encoding.ids, np.array(encoding.offsets)
    held = model.token_bytes * page * (room + 2)
    sizes = {"layers": model.layers, "q_heads": model.q_heads, "kv_heads": model.kv_heads, "head_dim": model.dim}
    sizes |= {"token_bytes": model.token_bytes, "full_kv_bytes": model.token_bytes * (len(ids) + new)}
    method = {
        "method": "top-k pages",
        "parameters": {"page": page, "pages": room},
        "budget_bytes": held,
        "budget": f"{room + 2} pages",
    }
    about |= {"model": "demo", "prompt_text": text, "max_new": new, "temperature": 0.0}
    writer = Writer(folder, engine="paged_decoder 1.0", dtype="float32", device="cpu", **sizes, **method, **about)
    writer.prompt(ids, [model.text(i) for i in ids], char_start=characters[:, 0], char_end=characters[:, 1])
    cache, full, log = PagedCache(model, page, room), PagedCache(model, page, None), Log(writer, model, page, len(ids))
    run_start = time.perf_counter()
    for each in (cache, full):
        each.forward(ids[:-1])
    output: list[int] = []
    reference: list[int] = []
    while len(output) < new and model.stop not in output:
        log.begin(len(cache.keys[0]))
        started, aside = time.perf_counter(), log.aside_s + writer.spent_s
        logits = cache.forward([(ids + output)[-1]], log)
        took = time.perf_counter() - started - (log.aside_s + writer.spent_s - aside)
        writer.attention(np.stack(log.read), full=np.stack(log.full))
        writer.grid("kv_step", h2d_bytes=log.moved, resident_bytes=np.full_like(log.moved, held / log.moved.size))
        if output == reference:  # full KV is compared until it chooses another token
            best = full.forward([(ids + output)[-1]])
            writer.compare(logits.numpy(), best.numpy(), model.text)
            reference.append(int(best.argmax()))
        output.append(int(logits.argmax()))
        cold = model.token_bytes * page * ((len(cache.keys[0]) - 1) // page)  # of pages that are whole
        times = {"t_us": int(1e6 * (started - run_start)), "dur_us": int(1e6 * took)}
        writer.step(output[-1], model.text(output[-1]), **times, resident_bytes=held, peak_bytes=held, cold_bytes=cold)
    while len(reference) < new and model.stop not in reference:  # what full KV goes on to say
        reference.append(int(full.forward([reference[-1]]).argmax()))
    texts = [model.tokens.decode(tokens, skip_special_tokens=True) for tokens in (output, reference)]
    writer.close(output_text=texts[0], stopped="eos" if model.stop in output else "length", reference_output=texts[1])
    return texts[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "prompt", "trace"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--answer", help="what a right output contains")
    parser.add_argument("--needle", default="", help="words of the prompt that hold the answer")
    for name, value in (("--page", 16), ("--pages", 4), ("--new", 12)):
        parser.add_argument(name, type=int, default=value)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    text, words = options.prompt.read_text(), options.needle
    needle = [[text.index(words), text.index(words) + len(words)]] if words else []
    sizes = options.page, options.pages, options.new
    print(decode(Llama(options.model), text, options.trace, *sizes, answer=options.answer, needle=needle))
