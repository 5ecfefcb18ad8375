"""The quantised linear layer: where whole numbers pay and where not, against float32 and the machine's own limits.

python 02_quantised_linear.py: one layer's four products at 1 to 512 rows, on 1 core and all -> GFLOP/s; a figure
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from ch11_quant_tp.quantisation import LIBRARY, QuantisedLinear, quantise
from shared.machine import measure_bandwidth
from shared.model import Linear

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # qkv, out, gate_up, down of this model
ROWS = (1, 4, 16, 64, 512)
FIGURE = Path(__file__).resolve().parent.parent / "results" / "ch11-quantised-linear.png"

Layers = list[Callable[[torch.Tensor], torch.Tensor]]


def milliseconds(layers: Layers, rows: int) -> float:
    inputs = [torch.randn(rows, columns) for _, columns in SHAPES]
    seconds = []
    for _ in range(5 if rows > 64 else 15):
        began = time.perf_counter()
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


def weight_only(layer: QuantisedLinear) -> Callable[[torch.Tensor], torch.Tensor]:
    """What one does without a kernel: make the float32 weights again, and multiply with those."""
    return lambda x: F.linear(x, layer.rows())


@torch.inference_mode()
def main() -> None:
    if LIBRARY is None:
        print("There is no kernel here (no C++ compiler, or NATIVE=0): int8 and int4 run in plain torch, slowly.\n")
    weights = [torch.randn(shape) for shape in SHAPES]
    floats = []
    for weight in weights:
        layer = Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight
        layer.pack()
        floats.append(layer)
    eight, four = ([QuantisedLinear(quantise(weight, quant)) for weight in weights] for quant in ("int8", "int4"))
    kinds: dict[str, Layers] = {
        "float32": list(floats),
        "int8": list(eight),
        "int4": list(four),
        "int4, weight only, no kernel": [weight_only(layer) for layer in four],
    }
    count = sum(weight.numel() for weight in weights)
    print(
        f"The four products of one layer, {count / 1e6:.1f} million weights. A decode step of one request has one row,"
    )
    print(
        "of sixteen requests sixteen; a prompt has hundreds. Predict: where does int8 gain most over float32, at 1 row,"
    )
    print("16 or 512? And int4 over int8?\n")
    threads = torch.get_num_threads()
    found: dict[str, list[float]] = {}
    for cores in sorted({1, threads}):
        torch.set_num_threads(cores)
        print(f"{cores} thread{'s' * (cores > 1)}: ms (GFLOP/s)")
        print(f"{'rows':>6}" + "".join(f"{name:>30}" for name in kinds))
        found = {name: [] for name in kinds}
        for rows in ROWS:
            line = f"{rows:>6}"
            for name, layers in kinds.items():
                took = milliseconds(layers, rows)
                found[name].append(2 * rows * count / took / 1e6)
                line += f"{f'{took:.2f} ({found[name][-1]:.0f})':>30}"
            print(line)
        print()
    torch.set_num_threads(threads)
    bandwidth = measure_bandwidth()
    print(f"Memory gives {bandwidth / 1e9:.0f} GB/s: at one row a layer can't take less than")
    sizes = {"float32": 4.0} | {n: sum(x.nbytes for x in q) / count for n, q in (("int8", eight), ("int4", four))}
    for name, each in sizes.items():
        least = count * each / bandwidth * 1e3
        print(f"   {name:<8} {least:5.2f} ms for {each:.2f} bytes a weight, if it weren't in a cache")
    draw(found)
    print(f"\nFigure: {FIGURE}")


def draw(found: dict[str, list[float]]) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    figure, ax = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for (name, rates), colour, marker in zip(
        found.items(), ("#000000", "#0072B2", "#D55E00", "#CC79A7"), "osD^", strict=True
    ):
        ax.plot(ROWS, rates, marker=marker, color=colour, label=name)
    ax.set(xscale="log", yscale="log", xlabel="rows (tokens in the pass)", ylabel="GFLOP/s")
    ax.set_xticks(ROWS, [str(rows) for rows in ROWS])
    ax.minorticks_off()
    ax.set_title("Whole numbers pay where memory or arithmetic is the limit")
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
