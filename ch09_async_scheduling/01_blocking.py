"""Why a blocking engine, and a static batch, waste the machine: short requests wait for a long one to end.

python 01_blocking.py: four requests, one of them long -> in turn, in a batch -> two timelines in results/
"""

import time
from pathlib import Path

import matplotlib.pyplot as plt

from ch05_kv_cache.engine import KVCacheEngine, TimedSequence
from shared.engine import SamplingParams
from shared.plots import Span, draw_rows, phase_legend

LENGTHS = (40, 4, 4, 4)  # output tokens of the four requests, the longest first
PROMPT_TOKENS = 24
FIGURE = Path(__file__).resolve().parent.parent / "results" / "ch09-blocking.png"


def main() -> None:
    engine = KVCacheEngine()
    engine.generate("warm up", 2)
    print(f"Four requests come at once: one wants {LENGTHS[0]} tokens, three want {LENGTHS[1]}.\n")

    print("1. One after the other, first come first served. Predict: how long does the last one wait for its first")
    print("   token, if it would take less than a second by itself?\n")
    began = time.perf_counter()
    in_turn = [row for i in range(len(LENGTHS)) for row in run(engine, [i], began)]
    report(in_turn)
    print("   It waited for all before it: head-of-line blocking.\n")

    print("2. All four in one static batch. Predict: which share of the batch's places is used?\n")
    began = time.perf_counter()
    batch = run(engine, list(range(len(LENGTHS))), began)
    report(batch)
    places, used = len(LENGTHS) * max(LENGTHS), sum(LENGTHS)
    print(f"   All get their first token at once. But of {places} places only {used / places:.0%} made a token, and a")
    print("   fifth request would wait until the longest is done: a convoy. Chapter 9 fills the places at each step.")
    draw(in_turn, batch)
    print(f"\nFigure: {FIGURE}")


def run(engine: KVCacheEngine, which: list[int], began: float) -> list[list[Span]]:
    """Run these requests as one static batch; what each did since `began`."""
    batch = [
        TimedSequence(
            list(range(1000 + i, 1000 + i + PROMPT_TOKENS)),
            SamplingParams(max_tokens=LENGTHS[i], ignore_eos=True),
            engine.tokenizer,
            engine.max_model_len,
        )
        for i in which
    ]
    started = time.perf_counter() - began
    times: dict[int, list[float]] = {id(seq): [] for seq in batch}
    for seq, _ in engine.run(list(batch)):
        times[id(seq)].append(time.perf_counter() - began)
    return [
        [
            (0.0, started, "waiting"),
            (started, times[id(seq)][0], "prefill"),
            (times[id(seq)][0], times[id(seq)][-1], "decode"),
        ]
        for seq in batch
    ]


def report(rows: list[list[Span]]) -> None:
    print("   request   tokens   first token after   done after")
    for i, (_, (_, first, _), (_, last, _)) in enumerate(rows):
        print(f"   {i:>7} {LENGTHS[i]:>8} {first:>17.2f} s {last:>10.2f} s")
    print()


def draw(in_turn: list[list[Span]], batch: list[list[Span]]) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    figure, axes = plt.subplots(2, 1, figsize=(8, 4.4), sharex=True, layout="constrained")
    draw_rows(axes[0], in_turn)
    axes[0].set(title="One after the other: everybody waits for the long one", xlabel="")
    draw_rows(axes[1], batch)
    axes[1].set_title("A static batch: places stay empty, and nobody may join")
    phase_legend(figure)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
