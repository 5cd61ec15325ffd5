"""Configures all tests: skips those that need a missing GPU, and saves start-up time."""

import gc
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import golden

gc.disable()  # imports leave hardly any garbage; it is enabled again after the collection
os.environ.setdefault("HF_HUB_OFFLINE", "1")
TESTS = Path(__file__).parent
STORE_WORKER = "harness"
"""The fixture of the tests that start the worker of a store."""

LATE = {
    *("engine/test_core.py", "engine/test_family_answers.py", "engine/test_grammars.py"),
    *("engine/test_modelled.py", "engine/test_tails.py", "engine/test_tails_at_random.py"),
    *("engine/test_queue.py", "integrations/test_vllm.py", "integrations/test_vllm_events.py"),
    *("integrations/test_vllm_restore.py", "kernels/test_paged_attention.py"),
    *("operate/test_chain_ids.py", "operate/test_prune.py", "sizing/test_whole_cache.py"),
    *("storage/test_crash_points.py", "storage/test_disk_floors.py", "storage/test_erasure.py"),
    *("storage/test_store_machine.py", "tieredkv/test_chat.py"),
    *("tieredkv/test_cli.py", "tieredkv/test_pieces.py"),
}
"""Files whose tests take a seventh of a second or more on average. They run behind the others, so
that most faults show within a minute.
"""

STATE = tempfile.mkdtemp(prefix="tieredkv-test-state-")  # the keys of stores that tests make
os.environ["XDG_STATE_HOME"] = STATE
for name in ("NO_PROXY", "no_proxy"):  # servers of tests are asked directly
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "localhost,127.0.0.1,::1"]))
if not torch.cuda.is_available():  # Triton reads this variable when it is imported later
    os.environ.setdefault("TRITON_INTERPRET", "1")
hypothesis.settings.register_profile(  # no test may fail because the machine is slow
    "tieredkv", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tieredkv")
# Models are tiny: several threads would only spin while they wait for each other's core.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that changes the texts which users read; see `tests/golden.py`."""
    parser.addoption(
        "--write-messages", action="store_true", help="keep the texts that tests compare"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep texts instead of comparing them if that was asked for, in one process."""
    golden.is_writing = config.getoption("--write-messages")
    if golden.is_writing and config.getoption("numprocesses", None):
        raise pytest.UsageError("--write-messages needs one process: leave out `-n`")


def pytest_sessionfinish() -> None:
    """Write the texts that were kept."""
    if golden.is_writing:
        golden.write()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse cases in a set, whose order differs from worker to worker."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        if any(
            isinstance(each, set | frozenset) for each in (*mark.args[1:2], *mark.kwargs.values())
        ):
            raise pytest.UsageError("the cases of a test are a set: sort them")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order and mark tests, and skip those marked `gpu` where there is no GPU."""
    items.sort(key=lambda item: item.path.relative_to(TESTS).as_posix() in LATE)
    for item in items:
        folder = item.path.parent.relative_to(TESTS).as_posix()
        if folder in ("stress", "e2e/programs"):
            item.add_marker("slow")
        elif folder == "e2e" or STORE_WORKER in getattr(item, "fixturenames", ()):
            item.add_marker("e2e")
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    """Enable garbage collection again; what the imports loaded is never examined."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Remove the keys of stores, and let extension modules free their objects.

    They would report leaks otherwise.
    """
    shutil.rmtree(STATE, ignore_errors=True)
    gc.unfreeze()
