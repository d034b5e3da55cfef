"""Stand-ins on a CPU: there only when the real package is not, and honest when called."""

from __future__ import annotations

import sys

import pytest

from sglang_patches.cpu import missing_packages


def test_a_stand_in_raises_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "no_such_package_of_kernels"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert missing_packages._provide(name, f"{name}.part")
    try:
        import no_such_package_of_kernels as kernels  # type: ignore[import-not-found]
        from no_such_package_of_kernels.part import thing  # type: ignore[import-not-found]

        with pytest.raises(RuntimeError, match=r"no_such_package_of_kernels\.attention was called.*not installed"):
            kernels.attention(1, 2)
        with pytest.raises(RuntimeError, match=r"part\.thing"):
            thing()
        assert not hasattr(kernels, "__wrapped__")
        assert not missing_packages._provide(name), "it is there now"
    finally:
        for each in (name, f"{name}.part"):
            del sys.modules[each]


def test_a_package_that_is_installed_is_left_alone() -> None:
    before = sys.modules["torch"]
    assert not missing_packages._provide("torch")
    assert sys.modules["torch"] is before
