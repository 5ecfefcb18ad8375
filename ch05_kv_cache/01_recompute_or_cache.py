"""What recomputing costs: the time of one more token against the tokens that are there, with and without a cache.

And what the cache costs: bytes for every token, worked out and measured.

    python 01_recompute_or_cache.py: one model, both ways -> ms a token at growing context; a figure in results/
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import psutil
import torch

from ch05_kv_cache.engine import KVCache, KVCacheEngine
from shared.model import causal_attend

CONTEXTS = (64, 256, 512, 1000)
FIGURE = Path(__file__).resolve().parent.parent / "results" / "ch05-recompute-or-cache.png"


def main() -> None:
    engine = KVCacheEngine()
    show_bytes(engine)
    show_time(engine)


def show_bytes(engine: KVCacheEngine) -> None:
    """2 (keys and values) x layers x KV heads x head dimension x bytes of a number, for each token."""
    config, dtype = engine.model.config, torch.float32
    predicted = KVCache.bytes_per_token(config, dtype)
    print("1. What a token costs in memory. Before you read on, work it out:")
    print(
        f"   {config.num_layers} layers, {config.num_kv_heads} KV heads of {config.head_dim} numbers, 4 bytes each.\n"
    )
    tokens = 4096
    before = psutil.Process().memory_info().rss
    cache = KVCache(config, 1, tokens, dtype, torch.device("cpu"))
    for numbers in (cache.keys, cache.values):
        numbers.fill_(1)  # the system hands memory out when it is written, not when it is asked for
    measured = (psutil.Process().memory_info().rss - before) / tokens
    print(
        f"   worked out: 2 x {config.num_layers} x {config.num_kv_heads} x {config.head_dim} x 4 = {predicted:,} bytes"
    )
    print(f"   measured:   {measured:,.0f} bytes of the process's memory for each of {cache.keys.shape[3]} places")
    print(f"   The context of {engine.max_model_len} tokens takes {predicted * engine.max_model_len / 1e6:.0f} MB.\n")


def show_time(engine: KVCacheEngine) -> None:
    """One more token, after 64, 256, ... tokens."""
    print("2. What a token costs in time. How much longer does one take after 1,000 tokens than after 64?\n")
    token_ids = engine.encode_prompt("word " * max(CONTEXTS))[: max(CONTEXTS)]
    cache = KVCache(engine.model.config, 1, max(CONTEXTS) + 1, torch.float32, torch.device("cpu"))
    engine.forward(token_ids, [0], [len(token_ids)], cache)

    def cached(context: int) -> Callable[[], object]:
        def step() -> None:
            cache.lengths = [context]  # the tokens after it are still there and are written over
            engine.model.logits(engine.forward([5], [0], [1], cache))

        return step

    def recomputed(context: int) -> Callable[[], object]:
        ids, positions = torch.tensor(token_ids[:context]), torch.arange(context)
        return lambda: engine.model.logits(engine.model(ids, positions, causal_attend)[-1:])

    with_cache = {n: milliseconds(cached(n), 7) for n in CONTEXTS}
    without = {n: milliseconds(recomputed(n), 1) for n in CONTEXTS}
    print("   context   recomputed   with a cache")
    for n in CONTEXTS:
        print(f"   {n:>7} {without[n]:>9.0f} ms {with_cache[n]:>11.0f} ms")
    growth = with_cache[CONTEXTS[-1]] / with_cache[CONTEXTS[0]]
    print(f"\n   With the cache, a token after {CONTEXTS[-1]} costs {growth:.2f} times one after {CONTEXTS[0]}:")
    print("   only attention grows, and it reads the cache. Everything else sees one token.")
    draw(without, with_cache)
    print(f"\n   Figure: {FIGURE}")


def milliseconds(step: Callable[[], object], repeats: int) -> float:
    """Median time of a call."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


def draw(without: dict[int, float], with_cache: dict[int, float]) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    ax.plot(list(without), list(without.values()), marker="o", color="#0072B2", label="recomputed, the same model")
    ax.plot(list(with_cache), list(with_cache.values()), marker="s", color="#D55E00", label="with a cache")
    ax.set(xlabel="tokens in the sequence", ylabel="time for the next token [ms]", xlim=(0, None), ylim=(0, None))
    ax.set_title("A cache takes the growth out of it")
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
