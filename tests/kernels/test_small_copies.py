"""Small copies by a kernel move the right words; pinned memory lives until it was read."""

# mypy: disable-error-code="no-untyped-call"

import pytest
import torch

from tieredkv.kernels import small_copies


@pytest.mark.parametrize("values", [[], [3], list(range(3000))])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_what_goes_to_a_device_comes_back(
    device: str, values: list[float], dtype: torch.dtype
) -> None:
    there = small_copies.to_device(values, dtype, torch.device(device))
    back = small_copies.to_host(there)
    if device == "cuda":
        torch.cuda.synchronize()
    assert there.device.type == device
    assert torch.equal(back, torch.tensor(values, dtype=dtype))


def test_the_kernel_copies_every_word_and_no_other(device: str) -> None:
    from tieredkv.kernels import word_copy

    source = torch.arange(5000, dtype=torch.int32, device=device)
    target = torch.full((5000,), -1, dtype=torch.int32, device=device)
    word_copy.copy_words(source[7:2500], target[9:2502])
    assert torch.equal(target[9:2502], source[7:2500])
    assert (target[:9] == -1).all() and (target[2502:] == -1).all()


@pytest.mark.gpu
def test_on_the_gpu_small_copies_keep_their_values_and_pass_a_large_one() -> None:
    large = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    space, stream, done = torch.empty_like(large, device="cuda"), torch.cuda.Stream(), None
    for num_large in (0, 8):  # first without large copies, so that all is allocated and compiled
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(num_large):
                space.copy_(large, non_blocking=True)
        copies = [
            small_copies.to_device([index] * 700, torch.int64, torch.device("cuda"))
            for index in range(50)
        ]
        sums = small_copies.to_host(torch.stack(copies).sum(1))
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        assert sums.tolist() == [700 * index for index in range(50)]
    assert not stream.query(), "a small copy waited for the large ones on another stream"
    torch.cuda.synchronize()
