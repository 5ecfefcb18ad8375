"""The loop that makes text: predict one token, append it, do it all again. And why that gets slower and slower.

python 03_autoregressive_loop.py: prompt -> forward -> choose -> append -> forward -> ...; a figure in results/
"""

import statistics
import time
from pathlib import Path

import matplotlib.pyplot as plt

from ch01_baseline.engine import BaselineEngine
from shared.engine import SamplingParams

PROMPT = "Once upon a time"
CONTEXTS = (16, 64, 128, 256)
FIGURE = Path(__file__).resolve().parent.parent / "results" / "ch01-cost-per-token.png"


def main() -> None:
    engine = BaselineEngine()
    show_greedy(engine)
    show_sampled(engine)
    show_growth(engine)


def show_greedy(engine: BaselineEngine, steps: int = 8) -> None:
    """The whole of text generation, in four lines."""
    print("\n1. Greedy: always the most likely token.\n")
    token_ids = engine.encode_prompt(PROMPT)
    for _ in range(steps):
        logits = engine.forward(token_ids)[0]  # [V]
        token_ids.append(int(logits.argmax()))
    print(f"   {engine.tokenizer.decode(token_ids)}\n")


def show_sampled(engine: BaselineEngine, steps: int = 5) -> None:
    """Drawing the token instead. A low temperature keeps to the likely ones, a high one wanders off."""
    print("2. Sampled, with a seed, so that you see the same each time:\n")
    for temperature in (0.3, 1.0, 2.0):
        params = SamplingParams(temperature=temperature, seed=1)
        print(f"   temperature {temperature}: {PROMPT + engine.generate(PROMPT, steps, params).text!r}")


def show_growth(engine: BaselineEngine) -> None:
    """The time for one more token, against the tokens that are there already."""
    print("\n3. Each step computes the whole sequence again. Before you look: how much longer does a token take")
    print(f"   after {CONTEXTS[-1]} tokens than after {CONTEXTS[0]}?\n")
    filler = engine.encode_prompt("word " * CONTEXTS[-1])
    medians = []
    for T in CONTEXTS:
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            engine.forward(filler[:T])
            seconds.append(time.perf_counter() - began)
        medians.append(statistics.median(seconds) * 1e3)
        print(f"   {T:>4} tokens: {medians[-1]:>5.0f} ms")
    slope = (medians[-1] - medians[0]) / (CONTEXTS[-1] - CONTEXTS[0])
    print(
        f"\n   Every token that is there adds {slope:.1f} ms to every later one: a text of n tokens costs about n²/2 of"
    )
    print("   them. Nothing that was computed for the earlier tokens has changed. Chapter 5 keeps it.")
    draw(medians)
    print(f"\n   Figure: {FIGURE}")


def draw(medians: list[float]) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    ax.plot(CONTEXTS, medians, marker="o", color="#0072B2")
    ax.set(xlabel="tokens in the sequence", ylabel="time for the next token [ms]", xlim=(0, None), ylim=(0, None))
    ax.set_title("Without a cache, each token costs more than the last")
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
