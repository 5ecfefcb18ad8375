"""An online engine that a test steps by hand, so that what arrives when is exactly repeatable."""

from collections.abc import Sequence
from dataclasses import dataclass

from ch09_async_scheduling.engine import AsyncEngine
from ch09_async_scheduling.scheduler import ScheduledSequence
from shared.engine import Delta, SamplingParams


def new_engine(checkpoint, engine_class: type[AsyncEngine], **settings) -> AsyncEngine:
    """An engine that checks its scheduler's and its cache's books after every step."""
    engine = engine_class(engine_class.config_class(model=str(checkpoint), **settings))
    step = engine.step

    def checked_step() -> None:
        step()
        engine.scheduler.check_integrity(taken_in(engine))

    engine.step = checked_step
    return engine


def taken_in(engine: AsyncEngine) -> list[ScheduledSequence]:
    """The unfinished sequences that the engine thread knows of and that can run."""
    known = {*engine.scheduler.waiting, *engine.scheduler.running}
    return [
        seq
        for request in list(engine._requests.values())
        for seq in request.sequences
        if seq.owner is not None and not seq.finished and (seq in known or seq.index == 0)
    ]


def idle(engine: AsyncEngine) -> bool:
    """Nothing runs, waits, is remembered, or holds a place in the cache."""
    stats = engine.stats()
    return (stats.running, stats.waiting, len(engine._requests), engine.memory()[0]) == (0, 0, 0, 0)


@dataclass
class Arrival:
    """A request that comes at a step, and is aborted after so many deltas."""

    prompt: str
    params: SamplingParams
    step: int = 0
    abort_after: int | None = None


def run(engine: AsyncEngine, arrivals: Sequence[Arrival]) -> list[list[Delta]]:
    """Step until everything has ended; the deltas of each. Raises what a request raised."""
    engine._error = None  # no thread will be started
    got: list[list] = [[] for _ in arrivals]
    due = sorted(range(len(arrivals)), key=lambda i: arrivals[i].step)
    steps = 0
    while due or engine._requests:
        while due and arrivals[due[0]].step <= steps:
            i = due.pop(0)
            engine._submit(f"r{i}", got[i].append, engine.encode_prompt(arrivals[i].prompt), arrivals[i].params)
        for i, arrival in enumerate(arrivals):
            if arrival.abort_after is not None and len(got[i]) >= arrival.abort_after:
                engine.abort(f"r{i}")
        if not engine._inbox.empty():
            engine._read_inbox()
        if engine.scheduler.has_work:
            engine.step()
        steps += 1
        assert steps < 5000, "it never ends"
    while not engine._inbox.empty():  # aborts of what had ended
        engine._read_inbox()
    for items in got:
        assert items[-1] is None
        assert items.count(None) == 1
        for item in items:
            if isinstance(item, Exception):
                raise item
    return [items[:-1] for items in got]


def token_ids(deltas: Sequence[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]
