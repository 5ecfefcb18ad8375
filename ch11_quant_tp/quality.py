"""How much quantising changes what the model says: perplexity, divergence and the most likely token, on a text.

python quality.py: quality.txt -> logits of the float32 model and of each quantised one -> a table, a line of JSON
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ch11_quant_tp.loading import load_quantised, weight_bytes
from ch11_quant_tp.quantisation import above_zero, in_groups
from shared.checkpoint import checkpoint_folder
from shared.config import EngineConfig
from shared.model import Linear, Transformer, causal_attend, load_model
from shared.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("quality.txt")
WINDOW = 512  # tokens that are read at a time, each window by itself


def per_tensor(weight: Tensor) -> Tensor:
    """int8 with one scale for the whole matrix."""
    scale = weight.abs().amax() / 127
    return (weight / scale).round() * scale


def per_channel(weight: Tensor) -> Tensor:
    """int8 with a scale for each output."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round() * scale


def symmetric_int4(weight: Tensor) -> Tensor:
    """-7 to 7 with a scale for each group of 32, and nothing else."""
    groups = in_groups(weight)
    scale = groups.abs().amax(dim=-1, keepdim=True) / 7
    return ((groups / above_zero(scale)).round() * scale).flatten(1)[:, : weight.shape[1]]


@torch.inference_mode()
def logits_of(model: Transformer, windows: list[Tensor]) -> list[Tensor]:
    return [model.logits(model(window, torch.arange(len(window)), causal_attend)).float() for window in windows]


@torch.inference_mode()
def compare(logits: list[Tensor], reference: list[Tensor], windows: list[Tensor]) -> dict[str, float]:
    """Perplexity, and against the reference its ratio, the mean KL divergence and the share of equal best tokens."""
    loss, own_loss, divergence, equal, count = 0.0, 0.0, 0.0, 0, 0
    for ours, theirs, window in zip(logits, reference, windows, strict=True):
        log_p, log_q = theirs.log_softmax(dim=-1), ours.log_softmax(dim=-1)  # [T, V]
        loss -= log_q[:-1].gather(1, window[1:, None]).sum().item()
        own_loss -= log_p[:-1].gather(1, window[1:, None]).sum().item()
        divergence += (log_p.exp() * (log_p - log_q)).sum().item()
        equal += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
        count += len(window)
    predicted = count - len(windows)
    return {
        "perplexity": float(torch.tensor(loss / predicted).exp()),
        "ratio": float(torch.tensor((loss - own_loss) / predicted).exp()),
        "kl": divergence / count,
        "same_token": equal / count,
    }


def simulated(folder: Path, rounded: Callable[[Tensor], Tensor]) -> Transformer:
    """The float32 model with each linear layer's weights rounded: weights alone, activations stay as they are."""
    model = load_model(folder, pack=False)
    for module in model.modules():
        if isinstance(module, Linear):
            module.weight.data = rounded(module.weight.data)
    return model


def main() -> None:
    config = EngineConfig()
    folder = checkpoint_folder(config.model)
    token_ids = torch.tensor(Tokenizer(folder).encode(TEXT.read_text(encoding="utf-8")))
    windows = list(token_ids.split(WINDOW))
    full = load_model(folder)
    full_bytes = weight_bytes(full)
    reference = logits_of(full, windows)
    del full
    models: dict[str, Callable[[], Transformer]] = {
        "int8, per tensor": lambda: simulated(folder, per_tensor),
        "int8, per channel": lambda: simulated(folder, per_channel),
        "int4 symmetric, groups of 32": lambda: simulated(folder, symmetric_int4),
        "QUANT=int8": lambda: load_quantised(folder, "int8"),
        "QUANT=int4": lambda: load_quantised(folder, "int4"),
    }
    rows = {"float32": compare(reference, reference, windows) | {"bytes": full_bytes}}
    for name, make in tqdm(models.items(), leave=False):
        model = make()
        rows[name] = compare(logits_of(model, windows), reference, windows)
        if name.startswith("QUANT"):
            rows[name]["bytes"] = weight_bytes(model)
    print(f"{len(token_ids)} tokens of {TEXT.name}, in windows of {WINDOW}\n")
    print(f"{'weights':<30} {'perplexity':>10} {'ratio':>7} {'KL':>8} {'same token':>10} {'MB':>7} {'share':>6}")
    for name, row in rows.items():
        size = f"{row['bytes'] / 1e6:7.1f} {row['bytes'] / full_bytes:6.1%}" if "bytes" in row else f"{'-':>7} {'-':>6}"
        figures = f"{row['perplexity']:10.3f} {row['ratio']:7.4f} {row['kl']:8.4f} {row['same_token']:10.1%}"
        print(f"{name:<30} {figures} {size}")
    print("\nThe first three round the weights alone; QUANT also rounds the activations, as the engine does.")
    print(json.dumps({"tokens": len(token_ids), "rows": rows}))


if __name__ == "__main__":
    main()
