"""Configuration of all tests: which tests this machine can run, and what they cost."""

import gc
import os

import hypothesis
import pytest
import torch

gc.disable()  # while test modules are imported: of what they load, hardly anything is garbage
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():  # Triton reads it when it is imported, which comes later
    os.environ.setdefault("TRITON_INTERPRET", "1")
hypothesis.settings.register_profile(  # no test is about time
    "tieredkv", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tieredkv")
# Models are tiny: several threads would only spin while they wait for each other's core.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the gpu tests out where there is no GPU, and say so."""
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    """Collect garbage again, but never look at what the imports have loaded."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let extension modules free what they hold, or they complain of leaks."""
    gc.unfreeze()
