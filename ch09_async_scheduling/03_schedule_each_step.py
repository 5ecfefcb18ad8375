"""The same requests in static batches and scheduled anew at each step: the places that were empty are filled.

python 03_schedule_each_step.py: twelve requests of uneven length -> tokens/s of both, two timelines in results/
"""

import asyncio
import random
import time
from pathlib import Path

import matplotlib.pyplot as plt

from ch05_kv_cache.engine import KVCacheEngine, TimedSequence
from ch09_async_scheduling.engine import AsyncConfig, AsyncEngine
from shared.engine import SamplingParams
from shared.machine import in_own_thread
from shared.plots import Span, draw_rows, phase_legend

PLACES = 4
FIGURE = Path(__file__).resolve().parent.parent / "results" / "ch09-each-step.png"


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(0)
    lengths = (30, 4, 6, 8) * 3
    return [
        ([rng.randrange(1000, 9000) for _ in range(16)], SamplingParams(max_tokens=n, ignore_eos=True)) for n in lengths
    ]


@in_own_thread  # or the other engine's thread wouldn't be the only one with OpenMP helpers
def static(engine: KVCacheEngine) -> list[list[Span]]:
    """Batches of four, each until its longest is done."""
    began, rows = time.perf_counter(), []
    todo = requests()
    for start in range(0, len(todo), PLACES):
        batch = [
            TimedSequence(ids, p, engine.tokenizer, engine.max_model_len) for ids, p in todo[start : start + PLACES]
        ]
        started, times = time.perf_counter() - began, {id(seq): [] for seq in batch}  # type: ignore[var-annotated]
        for seq, _ in engine.run(list(batch)):
            times[id(seq)].append(time.perf_counter() - began)
        rows += [spans(0.0, started, times[id(seq)]) for seq in batch]
    return rows


def continuous(engine: AsyncEngine) -> list[list[Span]]:
    """All at once to an engine with four places."""

    async def one(number: int, began: float) -> list[Span]:
        ids, params = requests()[number]
        times = []
        async for _ in engine.submit(f"r{number}", ids, params):
            times.append(time.perf_counter() - began)
        return spans(0.0, times[0] - first_step, times)

    async def everything() -> list[list[Span]]:
        await engine.start()
        began = time.perf_counter()
        rows = await asyncio.gather(*(one(number, began) for number in range(12)))
        await engine.shutdown()
        return list(rows)

    first_step = 0.1  # about what a prompt of 16 tokens takes; the engine doesn't tell when it began
    return asyncio.run(everything())


def spans(arrived: float, started: float, times: list[float]) -> list[Span]:
    started = max(arrived, started)
    return [(arrived, started, "waiting"), (started, times[0], "prefill"), (times[0], times[-1], "decode")]


def main() -> None:
    lengths = [params.max_tokens for _, params in requests()]
    print(f"Twelve requests want {lengths} tokens; {PLACES} run at a time.")
    steps = sum(max(lengths[i : i + PLACES]) for i in range(0, 12, PLACES))
    print(f"\nStatic batches take {steps} steps: the longest of each four. Predict how many continuous batching takes,")
    print("and how much faster it is.\n")
    old = KVCacheEngine()
    before = static(old)
    del old
    new = AsyncEngine(AsyncConfig(max_num_seqs=PLACES, max_model_len=512))
    taken: list[float] = []
    new.observe_step = taken.append
    new.generate("warm up", 2)
    taken.clear()
    new.close()
    after = continuous(new)
    print("               steps   seconds   tokens/s")
    for name, rows, count in (("static", before, steps), ("continuous", after, len(taken))):
        seconds = max(row[-1][1] for row in rows)
        print(f"   {name:<10} {count:>7} {seconds:>9.2f} {sum(lengths) / seconds:>10.1f}")
    draw(before, after)
    print(f"\nFigure: {FIGURE}")


def draw(before: list[list[Span]], after: list[list[Span]]) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    figure, axes = plt.subplots(2, 1, figsize=(8, 5.6), sharex=True, layout="constrained")
    draw_rows(axes[0], before)
    axes[0].set(title="Static batches of four: nobody joins before the longest is done", xlabel="")
    draw_rows(axes[1], after)
    axes[1].set_title("Scheduled anew at each step: a place that gets free is taken at once")
    phase_legend(figure)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
