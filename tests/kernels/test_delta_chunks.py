"""What the chunked gated delta rule needs of fla-core."""

import importlib.metadata

import pytest

from tieredkv.kernels import delta_chunks


@pytest.mark.parametrize("version", ["0.5.2", "0.6.1", "1.0.0", None])
def test_a_missing_or_another_version_of_the_kernels_is_told(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    why = delta_chunks.why_missing()
    assert why is not None
    assert why.endswith("; install `tieredkv[linear]`")
    assert (version or "not installed") in why


def test_the_version_that_is_known_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: delta_chunks.VERSION)
    assert delta_chunks.why_missing() is None
