"""Pages that the host copies one by one are those of the gather; a decode that recalls so is the same decode."""

from __future__ import annotations

import torch
from static_support import CASES, decoder, small_model
from support import random_prompt
from test_compiled import on_random

from kvlens.lab.gpu.static.host_moves import copy_each_page
from kvlens.lab.gpu.static.recall import fetch


def test_pages_are_those_of_the_gather() -> None:
    g = torch.Generator().manual_seed(0)
    pool = torch.randn(5, 2, 2, 4, 8, generator=g)
    unit = torch.tensor([[2, -1, 8], [5, 7, -1]], dtype=torch.int32)
    expected, found = ([torch.zeros(2, 3, 4, 8) for _ in range(2)] for _ in range(2))
    fetch(pool, unit, *expected, False)
    copy_each_page(pool, unit, *found, False)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_a_decode_led_by_the_host_is_the_same_decode() -> None:
    case, prompt = on_random(CASES[5]), random_prompt(140)
    plain, led = (decoder(small_model(case), prompt, case, 4) for _ in range(2))
    led.session.recall.move = copy_each_page
    try:
        assert led.decode(4) == plain.decode(4)
        assert torch.equal(led.moved_bytes(), plain.moved_bytes())
        assert led.moved_bytes().sum() > 0
    finally:
        plain.close()
        led.close()
