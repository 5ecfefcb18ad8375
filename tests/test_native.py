"""The C++ kernels against plain torch, and what happens where they can't be built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared import kernels, native

SOURCE = Path(kernels.__file__).with_name("kernels.cpp")


@pytest.fixture
def built() -> None:
    if kernels.LIBRARY is None:
        pytest.skip("no C++ compiler here, or NATIVE=0")


@pytest.mark.parametrize("rows", [1, 2, 7, 300])
@pytest.mark.parametrize("size", [1, 8, 33, 64, 576])
@pytest.mark.usefixtures("built")
def test_every_kernel_gives_torch_s_numbers(rows: int, size: int, monkeypatch: pytest.MonkeyPatch):
    """Rests of a vector left out, rows of one thread written by another, a row's stride taken for its size."""
    torch.manual_seed(rows * size)
    wide = torch.randn(rows, 2 * size + 3)
    x, weight, gate_up = wide[:, :size], torch.randn(size), 4 * torch.randn(rows, 2 * size)
    heads = torch.randn(rows, 5, 2 * size)
    matrix, bias = torch.randn(9, size), torch.randn(9)
    angles = torch.randn(rows, 1, size)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)

    def run() -> list[torch.Tensor]:
        turned = heads.clone()
        kernels.rotate_(turned[:, :3], cos, sin)
        product = kernels.linear(x[: kernels.FEW_ROWS], matrix, bias)
        return [product, kernels.rms_norm(x, weight, 1e-5), kernels.silu_mul(gate_up), turned]

    fast = run()
    monkeypatch.setattr(kernels, "LIBRARY", None)
    for ours, oracle in zip(fast, run(), strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("built")
def test_the_exponential_is_torch_s_even_at_its_ends(monkeypatch: pytest.MonkeyPatch):
    gate = torch.tensor([[-200.0, -88.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 88.0, 200.0, float("nan")]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    fast = kernels.silu_mul(gate_up)
    monkeypatch.setattr(kernels, "LIBRARY", None)
    torch.testing.assert_close(fast, kernels.silu_mul(gate_up), rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_run_through_torch(dtype: torch.dtype):
    x = torch.randn(3, 8, dtype=dtype)
    assert kernels.rms_norm(x, torch.ones(8, dtype=dtype), 1e-5).dtype == dtype
    assert kernels.silu_mul(x).dtype == dtype


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_without_a_compiler_one_line_says_so_and_torch_runs():
    code = "import torch; from shared.kernels import LIBRARY, silu_mul; print(LIBRARY, silu_mul(torch.ones(1, 2)))"
    result = run_python(code, CXX="/no/such/compiler")
    assert result.returncode == 0
    assert result.stdout == "None tensor([[0.7311]])\n"
    assert len(result.stderr.splitlines()) == 1
    assert "g++" in result.stderr


def test_the_kernels_can_be_switched_off():
    result = run_python("from shared.kernels import LIBRARY; print(LIBRARY)", NATIVE="0")
    assert (result.stdout, result.stderr) == ("None\n", "")


def test_a_source_that_changed_is_built_again_and_a_broken_one_is_told(tmp_path, capfd):
    """A stale library after an edit; a traceback of the compiler's."""
    if native.load(SOURCE) is None:
        pytest.skip("no C++ compiler here, or NATIVE=0")
    source = tmp_path / "made_up.cpp"
    values = []
    for value in (1, 2):
        source.write_text(f'extern "C" int made_up() {{ return {value}; }}')
        native.load.cache_clear()
        library = native.load(source)
        assert library is not None
        values.append(library.made_up())
    assert values == [1, 2]
    source.write_text("no C++ at all")
    native.load.cache_clear()
    assert native.load(source) is None
    assert "made_up.cpp: it can't be built" in capfd.readouterr().err
    for library_file in native.BUILD.glob("made_up-*.so"):
        library_file.unlink()
