"""The entry points of the kernels on a machine without Triton."""

import re
import subprocess
import sys

from tests.golden import told

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # what an import of it would raise without it
import torch
from tieredkv.errors import ModelError
from tieredkv.kernels import checks, launch

cache = checks.LayerCache(torch.zeros(2, 16, 2, 32), torch.zeros(2, 16, 2, 32))
k = torch.ones(1, 2, 32)
launch.store_kv(k, k, cache, torch.tensor([17]))
assert cache.k[1, 1].eq(1).all() and cache.k.sum() == 64
checks.use_triton = lambda device: True
try:
    launch.store_kv(k, k, cache, torch.tensor([17]))
except ModelError as error:
    sys.stdout.write(str(error))
"""


def test_without_triton_the_reference_serves_and_the_kernels_say_what_is_missing() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    told(re.sub(r"(?<=loaded: ).*", "CAUSE", result.stdout))
