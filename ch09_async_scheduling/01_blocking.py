"""Why a blocking engine, and a static batch, waste the machine: short requests wait for a long one to end.

python 01_blocking.py: five requests, one of them long -> in turn, in a batch -> two timelines in results/
"""

import time
from pathlib import Path

import matplotlib.pyplot as plt

from ch05_kv_cache.engine import KVCacheEngine, TimedSequence
from shared.engine import SamplingParams
from shared.plots import Span, draw_rows, phase_legend

LENGTHS = (30, 4, 4, 4, 4)  # output tokens, the longest first
ARRIVALS = (0.0, 0.0, 0.0, 0.0, 0.5)  # s
PROMPT_TOKENS = 24
FIGURE = Path(__file__).resolve().parent.parent / "results" / "ch09-blocking.png"


def main() -> None:
    engine = KVCacheEngine()
    engine.generate("warm up", 2)
    print(f"Four requests come at once: one wants {LENGTHS[0]} tokens, three want {LENGTHS[1]}. Half a second later")
    print(f"comes a fifth that wants {LENGTHS[4]}. Alone, each of the short ones takes a fraction of a second.\n")

    print("1. One after the other, first come first served. Predict: how long do the short ones wait for a token?\n")
    began = time.perf_counter()
    in_turn = [row for i in range(len(LENGTHS)) for row in run(engine, [i], began)]
    report(in_turn)
    print("   All wait for the long one, which came first: head-of-line blocking.\n")

    print("2. The four that are there in one static batch. Predict: which share of the batch's places is used? And")
    print("   when is it the fifth one's turn?\n")
    began = time.perf_counter()
    batch = run(engine, [0, 1, 2, 3], began) + run(engine, [4], began)
    report(batch)
    places, used = 4 * max(LENGTHS), sum(LENGTHS[:4])
    print(f"   The four get their first token at once. But of {places} places (4 in each of {max(LENGTHS)} steps) only")
    print(f"   {used / places:.0%} made a token, and the fifth waits beside empty places until the longest is done:")
    print("   a convoy. Chapter 9 fills the places at each step.")
    draw(in_turn, batch)
    print(f"\nFigure: {FIGURE}")


def run(engine: KVCacheEngine, which: list[int], began: float) -> list[list[Span]]:
    """Run these requests as one static batch, once all have come; what each did since `began`."""
    time.sleep(max(0.0, max(ARRIVALS[i] for i in which) - (time.perf_counter() - began)))
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
        [(ARRIVALS[i], started, "waiting"), (started, each[0], "prefill"), (each[0], each[-1], "decode")]
        for i, each in zip(which, times.values(), strict=True)
    ]


def report(rows: list[list[Span]]) -> None:
    print("   request   tokens   comes at   first token after   done after")
    for i, ((arrived, _, _), (_, first, _), (_, last, _)) in enumerate(rows):
        print(f"   {i:>7} {LENGTHS[i]:>8} {arrived:>8.1f} s {first - arrived:>17.2f} s {last - arrived:>10.2f} s")
    print()


def draw(in_turn: list[list[Span]], batch: list[list[Span]]) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    figure, axes = plt.subplots(2, 1, figsize=(8, 4.8), sharex=True, layout="constrained")
    draw_rows(axes[0], in_turn)
    axes[0].set(title="One after the other: everybody waits for the long one", xlabel="")
    draw_rows(axes[1], batch)
    axes[1].set_title("A static batch: places stay empty, and nobody may join")
    phase_legend(figure)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
