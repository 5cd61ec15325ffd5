"""The kernels compile for the H200 on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.levels import few

HOPPER_SHARED_BYTES = 227 << 10


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("which", "number"),
    few(
        [
            ("first", 3 * 12 + 2 * 2 + 5 + 2 * 5 + 6 * 2 + 8 * 2 + 7 + 3 + 4 + 4 + 2 * 6 + 3),
            ("others", 2 * 5 + 2 + 2 * 5 + 8 * 2),
        ]
    ),
)
def test_every_kernel_compiles_for_hopper_and_fits_its_shared_memory(
    tmp_path: Path, which: str, number: int
) -> None:
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_hopper.py")
    result = subprocess.run(
        [sys.executable, script, which],
        env=environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == number
    assert all(int(shared_bytes) <= HOPPER_SHARED_BYTES for _, shared_bytes in lines), lines
