"""The same requests in static batches and scheduled anew at each step: the places that were empty are filled.

python 03_schedule_each_step.py: twelve requests of uneven length -> tokens/s of both, two timelines in results/
"""

import asyncio
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt

from ch05_kv_cache.engine import KVCacheEngine, TimedSequence
from ch09_async_scheduling.engine import AsyncConfig, AsyncEngine
from shared.engine import SamplingParams, TokenIds
from shared.machine import in_own_thread
from shared.plots import Span, draw_rows, phase_legend, trace_rows
from shared.trace import read_trace

PLACES = 4
LENGTHS = (16, 2, 3, 5) * 3  # output tokens
PROMPT_TOKENS = 8
FIGURE = Path(__file__).resolve().parent.parent / "results" / "ch09-each-step.png"


def main() -> None:
    steps = sum(max(LENGTHS[i : i + PLACES]) for i in range(0, len(LENGTHS), PLACES))
    print(f"Twelve requests come at once and want {', '.join(map(str, LENGTHS))} tokens; {PLACES} run at a time.")
    print(f"\nStatic batches take {steps} steps: the longest of each four. Predict how many continuous batching takes,")
    print("and how much faster it is.\n")
    before = static()
    after, taken = continuous()
    print("                steps   places used   seconds   tokens/s")
    for name, rows, count in (("static", before, steps), ("continuous", after, taken)):
        seconds = max(end for row in rows for _, end, _ in row)
        used = sum(LENGTHS) / (count * PLACES)
        print(f"   {name:<10} {count:>7} {used:>13.0%} {seconds:>9.2f} {sum(LENGTHS) / seconds:>10.1f}")
    print("\n   A step of four costs more than a step of one, so the time shrinks less than the steps do.")
    draw(before, after)
    print(f"\nFigure: {FIGURE}")


def requests() -> list[tuple[TokenIds, SamplingParams]]:
    rng = random.Random(0)
    return [
        ([rng.randrange(1000, 9000) for _ in range(PROMPT_TOKENS)], SamplingParams(max_tokens=n, ignore_eos=True))
        for n in LENGTHS
    ]


@in_own_thread  # or the other engine's thread wouldn't be the only one with OpenMP helpers
def static() -> list[list[Span]]:
    """Chapter 5's engine: batches of four, each until its longest is done."""
    engine = KVCacheEngine()
    engine.generate("warm up", 2)
    rows: list[list[Span]] = []
    began = time.perf_counter()
    for first in range(0, len(LENGTHS), PLACES):
        batch = [
            TimedSequence(token_ids, params, engine.tokenizer, engine.max_model_len)
            for token_ids, params in requests()[first : first + PLACES]
        ]
        started = time.perf_counter() - began
        times: dict[int, list[float]] = {id(seq): [] for seq in batch}
        for seq, _ in engine.run(list(batch)):
            times[id(seq)].append(time.perf_counter() - began)
        for each in times.values():
            rows.append([(0.0, started, "waiting"), (started, each[0], "prefill"), (each[0], each[-1], "decode")])
    return rows


def continuous() -> tuple[list[list[Span]], int]:
    """Chapter 9's engine with four places: what its step trace says of all requests, and how many steps it took."""
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        engine = AsyncEngine(AsyncConfig(max_num_seqs=PLACES, max_model_len=512, trace=str(trace)))
        engine.generate("warm up", 2)
        engine.close()
        before = len(read_trace(trace))
        asyncio.run(submit_all(engine))
        steps = read_trace(trace)[before:]
    began = steps[0]["arrived"][0][1]
    rows = [[(start - began, end - began, phase) for start, end, phase in row] for row in trace_rows(steps)]
    return rows, sum(1 for step in steps if step["scheduled"])


async def submit_all(engine: AsyncEngine) -> None:
    async def read(number: int, token_ids: TokenIds, params: SamplingParams) -> None:
        async for _ in engine.submit(f"r{number}", token_ids, params):
            pass  # a server would send it on

    await engine.start()
    await asyncio.gather(*(read(number, *request) for number, request in enumerate(requests())))
    await engine.shutdown()


def draw(before: list[list[Span]], after: list[list[Span]]) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    figure, axes = plt.subplots(2, 1, figsize=(8, 5.6), sharex=True, layout="constrained")
    draw_rows(axes[0], before)
    axes[0].set(title="Static batches of four: nobody joins before the longest is done", xlabel="")
    draw_rows(axes[1], [[span for span in row if span[2] != "done"] for row in after])
    axes[1].set_title("Scheduled anew at each step: a place that gets free is taken at once")
    phase_legend(figure)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
