"""Under compute-sanitizer the kernels have no access out of bounds and no race."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL_TESTS = {
    "test_paged_attention.py": "((single_queries or chunks_and) and triton) or number_of_programs",
    "test_windows_and_sinks.py": "((7-medium or 1000-large) and triton) or number_of_programs",
    "test_prefill_products.py": "a_piece",
    "test_layers.py": "normed_and or rounded_and or rotated_and or one_row",
    "test_experts.py": "(added_up and triton) or stream_which or sorted_by or whole_tiles",
    "test_states.py": "(definition and triton) or copied_whole",
    "test_store_kv.py": "",
    "test_small_copies.py": "goes_to_a_device or every_word",
}


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("file", KERNEL_TESTS)
def test_on_the_gpu_kernels_are_clean(tool: str, file: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    tests = Path(__file__).with_name(file)
    checked = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable]
    pytest_options = ["-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", "--timeout", "500"]
    chosen = ["-k", KERNEL_TESTS[file]] if KERNEL_TESTS[file] else []
    result = subprocess.run(
        [*checked, "-P", "-m", "pytest", *pytest_options, *chosen, str(tests)],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "0 errors" in result.stdout or "0 hazards" in result.stdout, result.stdout[-500:]
    assert " passed" in result.stdout
