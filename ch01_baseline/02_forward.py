"""One forward pass: token ids in, a score for every token of the vocabulary out, and what that cost.

The model computes for each position which token comes next. For generation only the last position matters.

    python 02_forward.py: token ids [T] -> model -> logits [V] -> probabilities; arithmetic against the machine's
"""

import statistics
import time

import torch

from ch01_baseline.engine import BaselineEngine
from shared.machine import measure_flops

PROMPT = "The capital of France is"
LENGTHS = (1, 16, 64, 256)
REPEATS = 3


def main() -> None:
    engine = BaselineEngine()
    show_prediction(engine)
    show_cost(engine)


def show_prediction(engine: BaselineEngine) -> None:
    """The most likely next tokens of a prompt."""
    token_ids = engine.encode_prompt(PROMPT)
    logits = engine.forward(token_ids)[0]  # [V]
    probabilities = logits.softmax(dim=-1)  # [V]
    print(f"\n1. {PROMPT!r} is {len(token_ids)} tokens. The model gives {logits.shape[0]} logits; as probabilities:\n")
    for p, token_id in zip(*(t.tolist() for t in probabilities.topk(8)), strict=True):
        print(f"   {p:6.1%}  {'█' * round(p * 60):<40} {engine.tokenizer.decode([token_id])!r}")
    print("\n   Greedy decoding takes the first line. Sampling draws a line with its probability.\n")


def show_cost(engine: BaselineEngine) -> None:
    """The arithmetic of a pass: each weight of a matrix is multiplied and added once for each token."""
    weights, embedding = matrix_weights(engine)
    print("2. What a pass costs. Every token meets every weight of the layers once: 2 FLOP for each;")
    print("   the output layer is needed for the last token only.")
    print(f"   {weights / 1e6:.0f} M weights in the layers, {embedding / 1e6:.0f} M in the output layer.")
    print("   Before you read on: how much longer will 64 tokens take than 1?\n")
    peak = measure_flops(engine.model.device, engine.model.dtype)
    print(f"   This machine multiplies large matrices at {peak / 1e9:.0f} GFLOP/s. Median of {REPEATS} passes:\n")
    print("   tokens   GFLOP    time    GFLOP/s   of the machine's   time a token")
    for T in LENGTHS:
        flop = 2 * (weights * T + embedding)
        seconds = statistics.median(seconds_of_pass(engine, T) for _ in range(REPEATS))
        rate = flop / seconds
        print(
            f"   {T:>6} {flop / 1e9:>7.1f} {seconds:>6.2f} s {rate / 1e9:>9.0f} {rate / peak:>18.0%}"
            f" {seconds / T * 1e3:>11.1f} ms"
        )
    print("\n   One token uses a small part of the machine: its weights must come from memory all the same, and")
    print("   the hundreds of small operations around the products cost time too. Many tokens share that.")
    print("   Everything that makes an engine fast, batching first, comes from this table.")


def matrix_weights(engine: BaselineEngine) -> tuple[int, int]:
    """Weights in the layers' matrices, and in the output layer."""
    output = engine.model.get_output_embeddings()
    linear = [module for module in engine.model.modules() if isinstance(module, torch.nn.Linear)]
    return sum(m.weight.numel() for m in linear if m is not output), output.weight.numel()


def seconds_of_pass(engine: BaselineEngine, length: int) -> float:
    token_ids = torch.randint(engine.tokenizer.vocab_size, (length,)).tolist()
    began = time.perf_counter()
    engine.forward(token_ids)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
