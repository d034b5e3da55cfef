"""The wheel: it builds, installs and works outside the checkout, and ``import eep`` is light."""

from __future__ import annotations

import pathlib
import site
import subprocess
import sys
import textwrap
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*command: str | pathlib.Path, cwd: pathlib.Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(900)
def test_the_wheel_works_outside_the_checkout(tmp_path: pathlib.Path) -> None:
    # Without the CUDA library, whose compilation other tests see to and which takes a minute.
    wheel = ("pip", "wheel", "-q", "--no-deps", "--config-settings=cmake.define.EEP_CUDA=OFF")
    run(sys.executable, "-m", *wheel, "-w", tmp_path, ROOT, cwd=tmp_path)
    (built,) = tmp_path.glob("eep-*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, built, cwd=tmp_path)
    assert (packages / "sglang_patches" / "api" / "page.html").exists()
    assert (packages / "eep" / "hardware" / "reactions.toml").exists()
    # Torch from where it is; path entries in a .pth file do not bring the editable install of this checkout along.
    (packages / "torch.pth").write_text("\n".join(site.getsitepackages()))
    program = """
        import pathlib, sys, eep, torch
        assert pathlib.Path(eep.__file__).is_relative_to(sys.prefix), eep.__file__
        with eep.Rendezvous.temporary() as place:
            with eep.Buffer(0, rendezvous=place, max_ranks=1, max_tokens=2, hidden=4, topk=1, local_experts=1) as b:
                b.connect_ranks([0])
                t = eep.dispatch(b, torch.ones(2, 4, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64))
                print(eep.combine(b, t.x, t).sum().item(), b.status())
        assert (pathlib.Path(eep.__file__).parent / "py.typed").exists()
    """
    python = tmp_path / "env" / "bin" / "python"
    assert run(python, "-c", textwrap.dedent(program), cwd=tmp_path) == "8.0 epoch 1: all well\n"


def test_importing_the_package_does_not_import_torch() -> None:
    program = (
        "import sys, eep, eep.data_plane.control_page; assert 'torch' not in sys.modules; print(sorted(dir(eep))[0])"
    )
    assert run(sys.executable, "-c", program, cwd=ROOT) == "Buffer\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    program = "import eep\ntry: eep.nothing\nexcept AttributeError as error: print(error)"
    assert run(sys.executable, "-c", program, cwd=ROOT) == "module 'eep' has no attribute 'nothing'\n"
