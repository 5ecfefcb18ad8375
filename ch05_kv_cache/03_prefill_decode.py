"""Prefill and decode are two workloads: one is bound by arithmetic, the other by memory. A roofline shows both.

Arithmetic intensity is what a pass computes for each byte that it reads. A machine with bandwidth b and peak p reaches
at most min(p, intensity x b): the roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009).

    python 03_prefill_decode.py: passes of both kinds -> FLOP, bytes, seconds -> a figure in results/
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from ch05_kv_cache.engine import KVCache, KVCacheEngine
from shared.machine import measure_bandwidth, measure_flops

PREFILLS = (16, 64, 256)  # tokens of one prompt
DECODES = (1, 2, 4, 8, 16)  # sequences of a batch
CONTEXT = 64
FIGURE = Path(__file__).resolve().parent.parent / "results" / "ch05-roofline.png"


@dataclass
class Pass:
    """One forward pass: `rows` tokens of it, what it computes, what it must read, and how long it took."""

    kind: str
    rows: int
    flop: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        return self.flop / self.bytes


def main() -> None:
    engine = KVCacheEngine()
    bandwidth, peak = measure_bandwidth(), measure_flops()
    print(f"\nThis machine reads {bandwidth / 1e9:.1f} GB/s and multiplies at {peak / 1e9:.0f} GFLOP/s. A pass that")
    print(f"computes less than {peak / bandwidth:.0f} FLOP a byte waits for memory. Which of these will that be?\n")
    print("   pass                    FLOP/byte     time   GFLOP/s   of its limit   tokens/s")
    passes = [measure(engine, "prefill", 1, T) for T in PREFILLS]
    passes += [measure(engine, "decode", B, 1) for B in DECODES]
    for p in passes:
        limit = min(peak, p.intensity * bandwidth)
        what = f"{p.kind} of {p.rows} {'tokens' if p.kind == 'prefill' else 'sequence(s)'}"
        print(
            f"   {what:<22} {p.intensity:>9.1f} {p.seconds * 1e3:>6.0f} ms {p.flop / p.seconds / 1e9:>8.1f}"
            f" {p.flop / p.seconds / limit:>13.0%} {p.rows / p.seconds:>10.0f}"
        )
    one, many = (p for p in passes if p.kind == "decode" and p.rows in (1, 16))
    print(
        f"\n   16 sequences take {many.seconds / one.seconds:.1f} times as long as one and give 16 tokens: reading the"
    )
    print("   weights once for all of them is what a batch is for.")
    draw(passes, bandwidth, peak)
    print(f"\n   Figure: {FIGURE}")


def measure(engine: KVCacheEngine, kind: str, rows: int, tokens: int, repeats: int = 3) -> Pass:
    """`rows` sequences of `tokens` new tokens each; when decoding, after CONTEXT others."""
    config, context = engine.model.config, CONTEXT if kind == "decode" else 0
    cache = KVCache(config, rows, context + tokens, torch.float32, torch.device("cpu"))
    weights = sum(
        layer.in_features * layer.out_features
        for name, layer in engine.model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    )
    head = config.hidden_size * config.vocab_size
    flop = 2.0 * rows * (tokens * weights + head)
    read = 4.0 * (weights + head) + rows * context * KVCache.bytes_per_token(config, torch.float32)
    token_ids = [5] * (rows * tokens)
    seconds = []
    for _ in range(repeats):
        cache.lengths = [context] * rows
        began = time.perf_counter()
        hidden = engine.forward(token_ids, range(rows), [tokens] * rows, cache)
        engine.model.logits(hidden[tokens - 1 :: tokens])
        seconds.append(time.perf_counter() - began)
    return Pass(kind, rows * tokens, flop, read, statistics.median(seconds))


def draw(passes: list[Pass], bandwidth: float, peak: float) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    figure, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
    x = np.geomspace(0.3, 400, 200)
    ax.plot(x, np.minimum(peak, x * bandwidth) / 1e9, color="black", label="what the machine allows")
    for kind, colour, marker in (("prefill", "#0072B2", "o"), ("decode", "#D55E00", "s")):
        mine = [p for p in passes if p.kind == kind]
        ax.plot(
            [p.intensity for p in mine],
            [p.flop / p.seconds / 1e9 for p in mine],
            color=colour,
            marker=marker,
            linestyle="",
            label=f"{kind}, by {'tokens' if kind == 'prefill' else 'sequences'}",
        )
        for p in mine:
            ax.annotate(
                str(p.rows),
                (p.intensity, p.flop / p.seconds / 1e9),
                textcoords="offset points",
                xytext=(6, 4) if kind == "prefill" else (6, -10),
                fontsize=8,
            )
    ax.set(xscale="log", yscale="log", xlabel="FLOP for each byte read", ylabel="GFLOP/s")
    ax.set_title("Decode climbs along the memory's slope, prefill sits under the roof")
    ax.grid(alpha=0.3, which="both")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
