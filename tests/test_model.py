"""The model against transformers: for each family a tiny random checkpoint, and the bundled real one.

It knows the model's interface and its weights' names, and no engine.

    config -> transformers, random weights -> save_pretrained -> load_model -> the same logits at every position
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shared.checkpoint import checkpoint_folder
from shared.errors import SetupError
from shared.model import Linear, Transformer, causal_attend, load_model

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

# name -> (model_type, what differs from TINY)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 20}),
    "llama-no-shared-heads": ("llama", {"num_key_value_heads": 6}),
    "llama-one-key-head": ("llama", {"num_key_value_heads": 1}),
    "llama-rope-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-rope-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-rope-yarn-factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 8}}),
    "llama-rope-yarn-mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}}),
    "llama-rope-yarn-untruncated": ("llama", {"rope_parameters": {**YARN, "truncate": False}}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-unused": ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-attention-bias": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-head-dim": ("mistral", {"sliding_window": None, "head_dim": 12}),
}


def save_checkpoint(folder: Path, model_type: str, changes: dict[str, Any], **save: Any) -> PreTrainedModel:
    """A random checkpoint in `folder`, seeded, float32. Norm weights and biases are random too: ones and zeros, as
    transformers makes them, would hide a weight that is never loaded or used."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**TINY, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder, **save)
    return model


def random_tokens(count: int) -> Tensor:
    return torch.randint(3, TINY["vocab_size"], (count,), generator=torch.Generator().manual_seed(1))


def our_logits(model: Transformer, token_ids: Tensor) -> Tensor:
    """Logits [T, V] at every position of one sequence."""
    return model.logits(model(token_ids, torch.arange(len(token_ids)), causal_attend))


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    return model(input_ids=token_ids[None], use_cache=False).logits[0]


def rewrite_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


# --- the same logits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_those_of_transformers_at_every_position(name: str, tmp_path: Path) -> None:
    """Any fault of the arithmetic or of loading: a norm left out, q rotated the wrong way, k and v exchanged, ..."""
    reference = save_checkpoint(tmp_path, *CHECKPOINTS[name])
    token_ids = random_tokens(50)
    expected = reference_logits(reference, token_ids)
    assert expected.std() > 0.1  # logits that hardly differ would be equal whatever the model does
    torch.testing.assert_close(our_logits(load_model(tmp_path), token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("rope_scaling", "same_as"),
    [
        ({"type": "linear", "factor": 3.0}, {"rope_type": "linear", "rope_theta": 700.0, "factor": 3.0}),
        ({**YARN, "rope_theta": None}, {**YARN, "rope_theta": 700.0}),
        (None, {"rope_type": "default", "rope_theta": 700.0}),
    ],
    ids=["linear", "yarn", "default"],
)
def test_the_older_form_of_rope_settings_means_the_same(
    rope_scaling: dict[str, Any] | None, same_as: dict[str, Any], tmp_path: Path
) -> None:
    """Most checkpoints have rope_theta and rope_scaling apart; read as the default, text falls apart soon."""
    reference = save_checkpoint(tmp_path, "llama", {"rope_parameters": same_as})
    older = {key: value for key, value in (rope_scaling or {}).items() if value is not None} or None
    rewrite_config(tmp_path, rope_parameters=None, rope_theta=700.0, rope_scaling=older)
    assert "rope_parameters" not in json.loads((tmp_path / "config.json").read_text())
    token_ids = random_tokens(50)
    expected = reference_logits(reference, token_ids)
    torch.testing.assert_close(our_logits(load_model(tmp_path), token_ids), expected, atol=1e-4, rtol=0)


def test_sharded_checkpoint_gives_the_same_model(tmp_path: Path) -> None:
    """Parts of one fused parameter lie in different files, and a loader that goes file by file mixes their order up."""
    reference = save_checkpoint(tmp_path, "qwen2", {}, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    token_ids = random_tokens(20)
    expected = reference_logits(reference, token_ids)
    torch.testing.assert_close(our_logits(load_model(tmp_path), token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_converted_at_load_and_stay_near(dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights kept in the file's dtype, or norms computed in half precision."""
    save_checkpoint(tmp_path, "qwen3", {"head_dim": 16})
    model = load_model(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    token_ids = random_tokens(20)
    logits = our_logits(model, token_ids)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    exact = our_logits(load_model(tmp_path), token_ids)
    error = (logits.float() - exact).abs().mean()
    assert error < 2 * (reference_logits(reference, token_ids).float() - exact).abs().mean()


def test_rows_of_two_sequences_packed_together_equal_each_alone(tmp_path: Path) -> None:
    """A layer that looks at neighbouring rows, or takes positions from the row instead of from `positions`."""
    save_checkpoint(tmp_path, "llama", {})
    model = load_model(tmp_path)
    one, two = random_tokens(12)[:5], random_tokens(12)[5:]

    def attend_apart(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(q.split([5, 7]), k.split([5, 7]), v.split([5, 7]), strict=True)
        return torch.cat([causal_attend(layer, *part) for part in parts])

    positions = torch.cat((torch.arange(5), torch.arange(7)))
    together = model.logits(model(torch.cat((one, two)), positions, attend_apart))
    alone = torch.cat((our_logits(model, one), our_logits(model, two)))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_attend_is_called_once_a_layer_in_order_with_unrepeated_heads(tmp_path: Path) -> None:
    """A cache is indexed by layer and sized for KV heads: k repeated to H heads would cost H / KV times the memory."""
    save_checkpoint(tmp_path, "llama", {"head_dim": 20})
    calls = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return causal_attend(layer, q, k, v)

    hidden = load_model(tmp_path)(random_tokens(4), torch.arange(4), attend)
    assert calls == [(layer, (4, 6, 20), (4, 2, 20), (4, 2, 20)) for layer in range(3)]
    assert hidden.shape == (4, 48)


def test_logits_are_computed_for_the_asked_rows_alone(tmp_path: Path) -> None:
    """A prompt of 1,000 tokens needs one row of logits; all of them would be 200 MB and most of the prefill's time."""
    save_checkpoint(tmp_path, "llama", {})
    model = load_model(tmp_path)
    rows_seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: rows_seen.append(args[0].shape[0]))
    hidden = model(random_tokens(9), torch.arange(9), causal_attend)
    assert rows_seen == []
    assert model.logits(hidden[[3, 8]]).shape == (2, TINY["vocab_size"])
    assert rows_seen == [2]


def test_logits_do_not_depend_on_the_number_of_rows(tmp_path: Path) -> None:
    """Products with one, few and many rows take different paths on CPU; a wrong one would show in a batch alone."""
    save_checkpoint(tmp_path, "qwen2", {})
    model = load_model(tmp_path)
    hidden = model(random_tokens(40), torch.arange(40), causal_attend)
    everything = model.logits(hidden)
    for rows in (1, 2, 3, 4, 8, 16, 17, 33):
        torch.testing.assert_close(model.logits(hidden[:rows]), everything[:rows], atol=1e-5, rtol=0)
    for layer in (m for m in model.modules() if isinstance(m, Linear)):
        x = torch.randn(40, layer.in_features, generator=torch.Generator().manual_seed(2))
        everything = layer(x)
        for rows in (1, 2, 3, 4, 8, 16, 17, 33):
            torch.testing.assert_close(layer(x[:rows]), everything[:rows], atol=1e-5, rtol=0)


# --- loading ----------------------------------------------------------------------------------------------------------

PEAK_OF_LOADING = """
import sys
from pathlib import Path
from shared.model import load_model

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

before = kilobytes("VmRSS")
model = load_model(Path(sys.argv[1]))
print(1024 * (kilobytes("VmHWM") - before))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
def test_loading_never_holds_the_weights_twice(tmp_path: Path) -> None:
    """A state dict read whole and then copied, or layers packed while their plain weights are kept, need twice the
    memory, and a model that would fit doesn't start."""
    size = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
    save_checkpoint(tmp_path, "llama", size)
    weights = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert weights > 150e6
    command = [sys.executable, "-c", PEAK_OF_LOADING, str(tmp_path)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 0.9 * weights < peak < 1.5 * weights


MEMORY_OF_MANY_ROWS = """
import psutil
import torch
from shared.model import Linear

layer = Linear(576, 1536, bias=False)
layer.pack()
for rows in range(400, 0, -1):
    layer(torch.ones(rows, 576))
    if rows == 399:
        before = psutil.Process().memory_info().rss
print((psutil.Process().memory_info().rss - before) // 2**20)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_prompts_of_all_lengths_leave_no_memory_behind() -> None:
    """A kernel was kept for each number of rows: a server grew by 1.5 MB a request, for a quarter of an hour."""
    command = [sys.executable, "-c", MEMORY_OF_MANY_ROWS]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) < 120


def test_packing_can_be_left_out_and_changes_no_logits(tmp_path: Path) -> None:
    """Quantised and sharded layers are made from plain weights: those must be there, under their names."""
    save_checkpoint(tmp_path, "qwen2", {})
    plain, packed = load_model(tmp_path, pack=False), load_model(tmp_path)
    linears = {name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    each_layer = {"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"}
    assert linears == {f"layers.{layer}.{name}" for layer in range(3) for name in each_layer} | {"lm_head"}
    assert all(plain.get_submodule(name).weight is not None for name in linears)
    for count in (1, 5, 40):
        token_ids = random_tokens(count)
        torch.testing.assert_close(our_logits(plain, token_ids), our_logits(packed, token_ids), atol=1e-4, rtol=0)


def test_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    """A copy would be a fifth more memory for a model with a large vocabulary."""
    save_checkpoint(tmp_path, "llama", {"tie_word_embeddings": True})
    model = load_model(tmp_path)
    assert model.lm_head.weight.data_ptr() == model.embedding.weight.data_ptr()


# --- the real one -----------------------------------------------------------------------------------------------------


def test_bundled_model_agrees_with_transformers(real_model: str) -> None:
    """What tiny random weights don't show: outliers in the activations, and the real sizes of every layer."""
    folder = checkpoint_folder(real_model)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = (
        "A key-value cache keeps what attention has computed for earlier tokens, so that each new token is computed "
        "once. Without it, the model reads the whole text again for every token, and a long answer becomes slower and "
        "slower, until most of the time is spent on work that was done before. With it, a token's cost hardly grows."
    )
    token_ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    assert len(token_ids) >= 60
    ours, expected = our_logits(load_model(folder), token_ids), reference_logits(reference, token_ids)
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)
    assert ours.argmax(-1).tolist() == expected.argmax(-1).tolist()


# --- context ----------------------------------------------------------------------------------------------------------


def test_context_ends_where_a_sliding_window_would_begin_to_hide(tmp_path: Path) -> None:
    """Beyond the window the checkpoint attends to the last tokens only; a model without one would differ from there."""
    reference = save_checkpoint(tmp_path, "mistral", {"sliding_window": 24})
    model = load_model(tmp_path)
    assert model.max_model_len == 24
    token_ids = random_tokens(30)
    expected = reference_logits(reference, token_ids)
    ours = our_logits(model, token_ids)
    torch.testing.assert_close(ours[:24], expected[:24], atol=1e-4, rtol=0)
    assert (ours[24:] - expected[24:]).abs().max() > 1e-2  # what the limit protects from


@pytest.mark.parametrize(
    ("model_type", "changes", "length"),
    [
        ("llama", {}, 64),
        ("mistral", {"sliding_window": None}, 64),
        ("mistral", {"sliding_window": 4096}, 64),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, 64),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, 64),  # no layer is left
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, 8),
    ],
)
def test_context_length_is_the_trained_one_unless_a_window_is_active(
    model_type: str, changes: dict[str, Any], length: int, tmp_path: Path
) -> None:
    """Most Qwen configs name a window that they switch off: taken as active it would cut the context for nothing."""
    save_checkpoint(tmp_path, model_type, changes)
    assert load_model(tmp_path).max_model_len == length


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("gpt2", "GPT2LMHeadModel"), ("gemma", "GemmaForCausalLM"), ("phi3", "Phi3")]
)
def test_other_architectures_are_refused_by_name(model_type: str, architecture: str, tmp_path: Path) -> None:
    """A model with half-fitting weights loads and talks nonsense."""
    CONFIG_MAPPING[model_type](architectures=[architecture]).save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=f"{architecture} .*chapter 1") as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised"),
    ],
)
def test_settings_that_would_be_computed_wrongly_are_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """A setting that is read past gives a model that is wrong only a little, and nobody sees it."""
    save_checkpoint(tmp_path, "llama", {})
    rewrite_config(tmp_path, **changes)
    with pytest.raises(SetupError, match=named) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


def edit_weights(folder: Path, change: dict[str, Tensor | None]) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.update({name: tensor for name, tensor in change.items() if tensor is not None})
    for name in [name for name, tensor in change.items() if tensor is None]:
        del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


K_PROJ = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({f"{K_PROJ}.weight": None}, f"{K_PROJ}.weight is missing"),
        ({f"{K_PROJ}.weight": torch.zeros(16, 40)}, f"{K_PROJ}.weight has shape \\[16, 40\\]"),
        ({f"{K_PROJ}.weight": torch.zeros(9, 48)}, "shape"),
        ({f"{K_PROJ}.weight": torch.zeros(90, 48)}, "shape"),
        ({f"{K_PROJ}.bias": torch.zeros(16)}, f"{K_PROJ}.bias"),
    ],
    ids=["missing", "other width", "too few rows", "too many rows", "unknown"],
)
def test_weights_that_do_not_fit_the_config_are_refused_by_name(
    change: dict[str, Tensor | None], named: str, tmp_path: Path
) -> None:
    """Rows left uninitialised, or a bias that the file has and the model leaves out."""
    save_checkpoint(tmp_path, "llama", {})
    edit_weights(tmp_path, change)
    with pytest.raises(SetupError, match=named):
        load_model(tmp_path)


@pytest.mark.parametrize("damage", ["no file", "cut off", "a shard is gone"])
def test_missing_or_broken_files_are_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    """An interrupted download ends in a traceback of the safetensors library."""
    save_checkpoint(tmp_path, "llama", {}, max_shard_size="40KB" if damage == "a shard is gone" else "1GB")
    victim = sorted(tmp_path.glob("*.safetensors"))[-1]
    if damage == "cut off":
        victim.write_bytes(victim.read_bytes()[:-100])
    else:
        victim.unlink()
    with pytest.raises(SetupError, match="safetensors") as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_harmless_extra_tensors_of_older_checkpoints_are_left_out(tmp_path: Path) -> None:
    """Old exporters stored the rotary frequencies, and the tied head a second time: no reason to refuse them."""
    reference = save_checkpoint(tmp_path, "llama", {"tie_word_embeddings": True})
    extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for layer in range(3)}
    edit_weights(tmp_path, {**extra, "lm_head.weight": torch.zeros(101, 48)})
    token_ids = random_tokens(20)
    expected = reference_logits(reference, token_ids)
    torch.testing.assert_close(our_logits(load_model(tmp_path), token_ids), expected, atol=1e-4, rtol=0)
