"""Quantisation by hand: one scale for a whole matrix, for each output, for each group of 32; 8 bits and 4.

python 01_quantisation.py: a real weight matrix -> rounded seven ways -> error, size, why outliers matter; a figure
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from ch11_quant_tp.quantisation import quantise
from shared.checkpoint import checkpoint_folder
from shared.config import EngineConfig
from shared.model import load_model

FIGURE = Path(__file__).resolve().parent.parent / "results" / "ch11-quantisation.png"


def symmetric(weight: Tensor, bits: int, group: int | None) -> tuple[Tensor, float]:
    """Round to -m..m, m = 2^(bits - 1) - 1, with a scale for each `group` of columns (None: one for the matrix).

    Returns the rounded weights and the bytes of a weight, its part of a float32 scale counted.
    """
    m = 2 ** (bits - 1) - 1
    rows = weight.flatten()[None] if group is None else weight.unflatten(1, (-1, group)).flatten(0, 1)
    scale = rows.abs().amax(dim=1, keepdim=True) / m
    return ((rows / scale).round() * scale).view_as(weight), bits / 8 + 4 * len(rows) / weight.numel()


def asymmetric(weight: Tensor) -> tuple[Tensor, float]:
    """4 bits with a scale and a minimum, of 2 bytes each, for each group of 32."""
    return quantise(weight, "int4").dequantise(), 0.5 + 4 / 32


def main() -> None:
    config = EngineConfig()
    model = load_model(checkpoint_folder(config.model), pack=False)
    weight: Tensor = model.get_submodule("layers.10.mlp.down").weight  # type: ignore[assignment]
    columns = weight.shape[1]
    print(
        "1. By hand. Four weights, 0.9, -0.31, 0.05 and -1.27, in 8 bits: the largest becomes 127, 1 stands for 0.01:"
    )
    small = torch.tensor([[0.9, -0.31, 0.05, -1.27]])
    print(f"   {(small / 0.01).round().int().tolist()[0]} x 0.01. And in 4 bits, where the largest is 7?")
    print(f"   {(small / (1.27 / 7)).round().int().tolist()[0]} x {1.27 / 7:.3f}: the third weight is lost.\n")
    print(
        f"2. A real matrix, {list(weight.shape)}: mlp.down of layer 10. Predict which way is the best for its bytes.\n"
    )
    ways: dict[str, Callable[[], tuple[Tensor, float]]] = {
        "int8, one scale": lambda: symmetric(weight, 8, None),
        "int8, a scale an output": lambda: symmetric(weight, 8, columns),
        "int8, groups of 32": lambda: symmetric(weight, 8, 32),
        "int4, one scale": lambda: symmetric(weight, 4, None),
        "int4, a scale an output": lambda: symmetric(weight, 4, columns),
        "int4, groups of 32": lambda: symmetric(weight, 4, 32),
        "int4, groups, with minimum": lambda: asymmetric(weight),
    }
    errors, sizes = {}, {}
    print(f"   {'':<28} {'bytes a weight':>14} {'error':>8}")
    for name, way in ways.items():
        rounded, sizes[name] = way()
        errors[name] = ((rounded - weight).norm() / weight.norm()).item()
        print(f"   {name:<28} {sizes[name]:14.3f} {errors[name]:8.2%}")
    print("\n   The last way finds nothing to round: the model was published in just this format (Q4_1).\n")
    print(
        "3. Outliers. One weight ten times as large as all others, and one scale for all: what happens to the rest?\n"
    )
    worse = weight.clone()
    worse[0, 0] = 10 * weight.abs().max()
    for name, group in (("one scale", None), ("a scale an output", columns), ("groups of 32", 32)):
        before, after = (
            (symmetric(w, 8, group)[0][1:] - weight[1:]).norm() / weight[1:].norm() for w in (weight, worse)
        )
        print(f"   int8, {name:<18} error of all other outputs: {before:6.2%} before, {after:6.2%} with the outlier")
    draw(errors, sizes)
    print(f"\nFigure: {FIGURE}")


def draw(errors: dict[str, float], sizes: dict[str, float]) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
    names = list(errors)[::-1]
    colours = ["#0072B2" if name.startswith("int8") else "#D55E00" for name in names]
    ax.barh(names, [max(errors[name], 1e-4) for name in names], color=colours)
    for y, name in enumerate(names):
        ax.text(max(errors[name], 1e-4) * 1.1, y, f"{errors[name]:.2%}, {sizes[name]:.2f} bytes", va="center")
    ax.set(xscale="log", xlabel="relative error of the weights", xlim=(1e-4, 3), title="Small groups are cheap")
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
