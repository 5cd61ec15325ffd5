"""A stop on a disk that fails tells its caller that blocks of a promise are lost."""

import errno
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden import refused, told
from tests.storage.fuse import FaultyDisk, mounted_faulty_disk
from tests.waiting import HANG_S
from tieredkv import LLM, SamplingParams
from tieredkv.errors import BlocksLostError

PROMPT = "promised " * 40
SIZES: dict[str, Any] = {"device_size": "16MiB", "host_size": "16MiB", "disk_size": "256MiB"}


@pytest.fixture
def faulty_disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    """Return a disk on which every write of a block fails."""
    with mounted_faulty_disk(tmp_path) as disk:
        disk.set_faults(only=".seg", fail_writes=errno.EIO)
        yield disk
        disk.set_faults()


def llm_that_promised(disk: FaultyDisk) -> LLM:
    """Return an LLM that owes a prompt's blocks to the disk."""
    llm = LLM("tiny-random", retention="24h", disk_dir=str(disk.folder), **SIZES)
    llm.generate(PROMPT, SamplingParams(max_tokens=1))
    return llm


def test_close_raises_once_everything_is_closed(faulty_disk: FaultyDisk) -> None:
    llm = llm_that_promised(faulty_disk)
    pid = llm.core.info.worker_pid
    with refused(BlocksLostError):
        llm.close()
    assert not Path(f"/proc/{pid}").exists()
    llm.close()


def test_the_end_of_a_with_block_raises_too(faulty_disk: FaultyDisk) -> None:
    with pytest.raises(BlocksLostError), llm_that_promised(faulty_disk):
        pass


def test_the_error_of_a_with_block_is_not_replaced_and_the_loss_is_logged(
    faulty_disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), llm_that_promised(faulty_disk):
        1 / 0  # noqa: B018
    [lost] = [each for each in caplog.records if each.levelno == logging.ERROR]
    told(lost.getMessage())


def test_generate_prints_the_answer_and_ends_with_exit_code_1(faulty_disk: FaultyDisk) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "tieredkv", "generate", "tiny-random", PROMPT, "--json"),
            *("--max-tokens", "2", "--default-retention", "24h"),
            *(
                "--disk-dir",
                str(faulty_disk.folder),
                "--host-size",
                "8MiB",
                "--device-size",
                "8MiB",
            ),
        ],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.returncode == 1, result.stderr
    told("\n".join(it for it in result.stderr.splitlines() if it.startswith("error: ")))
    [output] = json.loads(result.stdout.splitlines()[-1])["outputs"]
    assert len(output["token_ids"]) == 2
