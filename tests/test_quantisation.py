"""Chapter 11's quantised layers: what rounding costs, the kernel against plain torch, and the model made of them."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ch11_quant_tp import quality
from ch11_quant_tp import quantisation as chapter
from ch11_quant_tp.engine import Engine, FullConfig
from ch11_quant_tp.loading import load_quantised, weight_bytes
from ch11_quant_tp.quantisation import QuantisedEmbedding, QuantisedLinear, quantise, quantise_activations
from shared.engine import SamplingParams, SetupError
from shared.model import causal_attend, load_model
from shared.tokenizer import Tokenizer
from tests.stepped import new_engine
from tests.test_model import CHECKPOINTS, save_checkpoint

QUANTS = ("int8", "int4")


@pytest.mark.parametrize("quant", QUANTS)
def test_weights_are_within_half_a_step_and_the_largest_is_exact(quant: str):
    weight = torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    weight[3, :32] = 0
    weight[4, 40] = 77.0
    q = quantise(weight, quant)
    error = (q.dequantise() - weight).abs()
    steps = q.scales.float().repeat_interleave(32, dim=1)[:, :100]
    assert (error <= 0.501 * steps + 2e-3 * weight.abs()).all()  # float16 scales are off by a two-thousandth
    assert (q.dequantise()[3, :32] == 0).all()
    assert q.dequantise()[4, 40] == pytest.approx(77.0, rel=1e-3)


def test_what_was_published_in_four_bits_comes_back_exactly():
    """Q4_1: scale and minimum in float16, q from 0 to 15."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(0, 16, (8, 3, 32), generator=generator)
    q[..., 0], q[..., 1] = 0, 15
    scales, minima = torch.rand(8, 3, 1, generator=generator).half(), torch.randn(8, 3, 1, generator=generator).half()
    weight = (q * scales.float() + minima.float()).flatten(1)
    torch.testing.assert_close(quantise(weight, "int4").dequantise(), weight, rtol=0, atol=2e-3)
    assert (quantise(weight, "int4").values == q).float().mean() > 0.999


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("columns", [8, 32, 40, 576])
@pytest.mark.parametrize("outputs", [1, 7, 16, 49])
def test_the_kernel_is_its_oracle(quant: str, columns: int, outputs: int):
    """Groups, tiles and rows that aren't full; a stride; a bias."""
    if chapter.LIBRARY is None:
        pytest.skip("no C++ compiler here, or NATIVE=0")
    generator = torch.Generator().manual_seed(columns * outputs)
    weight, bias = torch.randn(outputs, columns, generator=generator), torch.randn(outputs, generator=generator)
    layer = QuantisedLinear(quantise(weight, quant), bias)
    for rows in (1, 2, 3, 4, 5, 6, 7, 16, 65, 130):
        x = torch.randn(rows, columns + 5, generator=generator)[:, :columns]
        expected = F.linear(quantise_activations(x), quantise(weight, quant).dequantise(), bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        for row in range(rows):
            assert torch.equal(layer(x[row : row + 1])[0], layer(x)[row]), "a row depends on the others"


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1)])
def test_nothing_saturates(quant: str, signs: tuple[int, int]):
    """All weights and activations at their largest: pairs of products are added in 16 bits."""
    weight = torch.full((16, 64), float(signs[0]))
    weight[:, ::2] *= 1 if quant == "int8" else -1  # of a constant group 4 bits would keep the minimum alone
    layer = QuantisedLinear(quantise(weight, quant))
    x = torch.full((3, 64), float(signs[1]))
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("quant", QUANTS)
def test_without_the_kernel_torch_gives_the_same(quant: str, monkeypatch: pytest.MonkeyPatch):
    """Also where a number isn't one: the row is lost, and no other."""
    weight, x = torch.randn(20, 70), torch.randn(4, 70)
    x[1, 3], x[2, 69] = float("nan"), -float("inf")
    layer = QuantisedLinear(quantise(weight, quant))
    fast = layer(x)
    assert fast.isnan().all(dim=1).tolist() == [False, True, True, False]
    monkeypatch.setattr(chapter, "LIBRARY", None)
    torch.testing.assert_close(fast, layer(x), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_in_another_dtype_has_its_bias_still(quant: str, dtype: torch.dtype):
    """The kernel reads biases of 32 bits: of 16 it would make other numbers, and read beyond them."""
    bias, x = torch.randn(20).to(dtype), torch.randn(4, 64)
    layer = QuantisedLinear(quantise(torch.zeros(20, 64), quant), bias.float()).to(dtype)  # all there is, is the bias
    assert torch.equal(layer(x), bias.float().expand(4, 20))
    assert torch.equal(layer(x.to(dtype)), bias.expand(4, 20))


@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx512f -mno-avx2"])
def test_the_kernel_built_for_lesser_processors_is_its_oracle(flags: str):
    """The instructions of this machine hide the paths that others take."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if chapter.LIBRARY is None or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler here, or NATIVE=0, or another kind of processor")
    names = "test_the_kernel_is_its_oracle or test_nothing_saturates or test_without_the_kernel"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", names],
        env={**os.environ, "CXX": f"{compiler} {flags}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert "skipped" not in run.stdout


@pytest.mark.parametrize("quant", QUANTS)
def test_the_embedding_reads_rows_of_the_output_layer(quant: str):
    weight = torch.randn(37, 64)
    table = QuantisedLinear(quantise(weight, quant))
    ids = torch.tensor([0, 7, 8, 15, 16, 36])
    torch.testing.assert_close(QuantisedEmbedding(table)(ids), quantise(weight, quant).dequantise()[ids])


@pytest.mark.parametrize("name", ["llama-tied", "llama-mlp-bias", "qwen2", "qwen2-tied", "qwen3", "mistral"])
@pytest.mark.parametrize("quant", QUANTS)
def test_every_family_loads_quantised(tmp_path, name: str, quant: str):
    """Biases, q/k norms, tied and untied heads."""
    save_checkpoint(tmp_path, *CHECKPOINTS[name])
    folder = tmp_path
    ids = torch.arange(3, 20)
    quantised = load_quantised(folder, quant)
    ours = quantised.logits(quantised(ids, torch.arange(17), causal_attend))
    full = load_model(folder, pack=False)
    for module_name, module in quantised.named_modules():
        if isinstance(module, QuantisedLinear) and "table" not in module_name:
            full.get_submodule(module_name).weight.data = module.rows()
    if isinstance(quantised.embedding, QuantisedEmbedding):
        full.embedding.weight.data = quantised.embedding.table.rows()
    exact = full.logits(full(ids, torch.arange(17), causal_attend))
    spread = exact.std()
    assert (ours - exact).abs().mean() < 0.05 * spread  # what is left is the activations' rounding


def test_the_real_model_takes_the_memory_that_it_should(real_model):
    folder = Path(__file__).resolve().parent.parent / "models" / real_model
    full = weight_bytes(load_model(folder))
    assert full == pytest.approx(134_515_008 * 4, rel=1e-3)
    assert weight_bytes(load_quantised(folder, "int8")) <= 0.30 * full
    assert weight_bytes(load_quantised(folder, "int4")) <= 0.20 * full


def test_loading_never_holds_the_float32_model(real_model):
    """Peak memory of a process that loads 4 bits: 98 MB, and one layer of float32 at a time."""
    code = (
        "import resource, sys; from pathlib import Path; from ch11_quant_tp.loading import load_quantised\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "model = load_quantised(Path(sys.argv[1]), 'int4')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    folder = Path(__file__).resolve().parent.parent / "models" / real_model
    run = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    # The largest single tensor, the embedding, is 113 MB in float32 and is copied a few times while it is rounded.
    assert int(run.stdout) * unit < 700e6


@pytest.mark.parametrize("settings", [{"quant": "int8"}, {"quant": "int4"}, {"quant": "int8", "kv_dtype": "int8"}])
def test_a_quantised_answer_is_the_same_alone_and_in_any_batch(real_model, settings):
    engine = Engine(FullConfig(max_model_len=512, max_num_seqs=5, prefix_caching=False, **settings))
    prompts = ["The capital of France is", "1, 1, 2, 3, 5,", "Once upon a time", "word " * 40, "def f(x):"]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    together = engine.generate_batch(prompts, params)
    alone = [engine.generate(prompt, params=params) for prompt in prompts]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert "Paris" in together[0].text
    engine.close()


def test_quality_is_within_its_bounds(real_model):
    """Perplexity within 1 %, divergence at most 0.015, as the README shows it for the whole text."""
    folder = Path(__file__).resolve().parent.parent / "models" / real_model
    token_ids = Tokenizer(folder).encode(quality.TEXT.read_text(encoding="utf-8"))
    windows = list(torch.tensor(token_ids[:1024]).split(512))
    reference = quality.logits_of(load_model(folder), windows)
    for quant in QUANTS:
        row = quality.compare(quality.logits_of(load_quantised(folder, quant), windows), reference, windows)
        assert abs(row["ratio"] - 1) <= 0.01
        assert row["kl"] <= 0.015
    rounded = quality.logits_of(quality.simulated(folder, quality.per_tensor), windows)
    assert quality.compare(rounded, reference, windows)["kl"] > 0.03, "one scale for a whole matrix is the lesson"


def test_quant_with_another_dtype_is_refused(tiny_checkpoint):
    with pytest.raises(SetupError, match="QUANT=int8 computes in float32"):
        new_engine(tiny_checkpoint, Engine, quant="int8", dtype="bfloat16")
    with pytest.raises(SetupError, match="QUANT=int2"):
        FullConfig(quant="int2")


def test_an_int8_cache_holds_four_times_the_tokens(tiny_checkpoint):
    wide = new_engine(tiny_checkpoint, Engine, max_num_seqs=2)
    narrow = new_engine(tiny_checkpoint, Engine, max_num_seqs=2, kv_dtype="int8")
    assert wide.bytes_per_block() == 16 * 2 * 2 * 2 * 8 * 4
    assert narrow.bytes_per_block() == 16 * 2 * 2 * 2 * (8 + 4)
    assert narrow.cache.keys.nbytes == wide.cache.keys.nbytes // 4
