"""The plans that `tieredkv doctor` tells are those that the engine makes."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cli import outlook
from tieredkv.cli.outlook import Rates, plans
from tieredkv.config import load_settings
from tieredkv.engine.loader import model_of
from tieredkv.steps import pairs


def compute_rate(*_: object) -> ComputeRate:
    """Return what one H200 takes for Llama-3.1-8B, roughly."""
    rate = ComputeRate(16_384)
    for num_tokens in (64, 512, 2_048, 8_192, 16_384):
        for begin in (0, 32_768):
            num_pairs = pairs(begin, begin + num_tokens)
            rate.learn(num_tokens, num_pairs, max(0.006, 2.4e-5 * num_tokens) + 7e-10 * num_pairs)
    return rate


def test_what_a_fast_host_link_has_is_loaded_in_whole_and_what_a_disk_has_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outlook, "_compute_rate", compute_rate)
    told = {"model": "random:llama-3.1-8b", "device": "cpu", "dtype": "bfloat16"}
    settings = load_settings(arguments=told).settings
    rates = Rates(h2d_GBps=50.0, disk_GBps=2.7, saved=None, findings=[])
    for plan in plans(settings, rates):  # a CPU does one thing at a time
        assert plan["split_token"] < 512 or plan["split_token"] == plan["prefix_tokens"]
        assert plan["planned_ms"] <= 1.13 * min(plan["compute_ms"], plan["load_ms"])
    on_gpu = partial(replace, device=torch.device("cuda"))
    monkeypatch.setattr(outlook, "model_of", lambda it: on_gpu(model_of(it)))
    made = plans(settings, rates)
    computed = {(it["tier"], it["prefix_tokens"]): it["split_token"] for it in made}
    assert computed["host", 8_192] == 0
    assert 0 < computed["disk", 8_192] < 8_192
    for plan in made:
        assert plan["planned_ms"] <= 1.02 * min(plan["compute_ms"], plan["load_ms"])
    slow = plans(settings, Rates(h2d_GBps=1.0, disk_GBps=2.7, saved=None, findings=[]))
    took_ms = {(it["tier"], it["prefix_tokens"]): it["load_ms"] for it in slow}
    assert took_ms["disk", 8_192] >= took_ms["host", 8_192], "its bytes pass through PCIe"
