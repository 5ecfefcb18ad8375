"""Paged attention two ways: gather each sequence's blocks into a copy and attend, or read the blocks where they lie.

python 03_paged_attention.py: the same blocks, the same numbers -> time and bytes moved of both; a figure in results/
"""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from ch10_paged_cache.paged_attention import LIBRARY, Batch, gather_attention, paged_attention
from shared.machine import measure_bandwidth

H, KV, D, BLOCK = 9, 3, 64, 16  # this model's
CONTEXTS = (128, 512, 2048)
FIGURE = Path(__file__).resolve().parent.parent / "results" / "ch10-paged-attention.png"


def milliseconds(work: Callable[[], object], repeats: int = 7) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


def decode_step(sequences: int, context: int) -> tuple[float, float, float, float]:
    """(ms gathered, ms in place, largest difference, MB that must be read) of one layer, one new token a sequence."""
    blocks = -(-context // BLOCK)
    N = sequences * blocks
    order = list(range(N))
    random.Random(0).shuffle(order)
    tables = [order[i * blocks : (i + 1) * blocks] for i in range(sequences)]
    keys, values = torch.randn(N, KV, BLOCK, D), torch.randn(N, KV, BLOCK, D)
    q = torch.randn(sequences, H, D)
    batch = Batch.build(tables, [context - 1] * sequences, [1] * sequences, BLOCK)
    gathered, in_place = gather_attention(q, keys, values, batch), paged_attention(q, keys, values, batch)
    return (
        milliseconds(lambda: gather_attention(q, keys, values, batch)),
        milliseconds(lambda: paged_attention(q, keys, values, batch)),
        (gathered - in_place).abs().max().item(),
        sequences * context * KV * D * 2 * 4 / 1e6,
    )


def main() -> None:
    if LIBRARY is None:
        print("There is no kernel here (no C++ compiler, or NATIVE=0): both ways are the gathering one.\n")
    print(
        "One layer's attention for a decode step: each sequence asks with one token and reads all its keys and values."
    )
    print(
        "Gathering copies them first, repeated for the query heads that share them. Predict: how much slower is that?\n"
    )
    bandwidth = measure_bandwidth()
    print(
        f"{'sequences':>9} {'context':>8} {'MB':>6} {'gathered':>10} {'in place':>10} {'times':>6} {'GB/s':>6}  differ"
    )
    rows = []
    for sequences in (1, 16):
        for context in CONTEXTS:
            slow, fast, difference, megabytes = decode_step(sequences, context)
            rows.append((sequences, context, slow, fast))
            print(
                f"{sequences:>9} {context:>8} {megabytes:6.1f} {slow:7.2f} ms {fast:7.2f} ms {slow / fast:6.1f} "
                f"{megabytes / fast:6.1f}  {difference:.0e}"
            )
    print(f"\nMemory gives {bandwidth / 1e9:.0f} GB/s here; what is more comes out of the processor's caches.")
    print("In place, each key and value is read once, for all query heads that share it, and nothing is written.")
    draw(rows)
    print(f"\nFigure: {FIGURE}")


def draw(rows: list[tuple[int, int, float, float]]) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    figure, ax = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    mine = [row for row in rows if row[0] == 16]
    contexts = [row[1] for row in mine]
    ax.plot(contexts, [row[2] for row in mine], marker="s", color="#D55E00", label="gathered into a copy first")
    ax.plot(contexts, [row[3] for row in mine], marker="o", color="#0072B2", label="read in place")
    ax.set(xscale="log", yscale="log", xlabel="context of each of 16 sequences (tokens)", ylabel="ms a layer")
    ax.set_xticks(contexts, [str(context) for context in contexts])
    ax.minorticks_off()
    ax.set_title("A copy costs more than the attention")
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
