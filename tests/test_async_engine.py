"""Chapter 9's engine and scheduler: whatever arrives when, each request gets chapter 1's tokens, nothing is left."""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ch01_baseline.engine import BaselineEngine
from ch09_async_scheduling.engine import AsyncConfig, AsyncEngine
from ch09_async_scheduling.scheduler import ScheduledSequence, Scheduler
from ch09_async_scheduling.slot_cache import SlotCache
from shared.config import EngineConfig
from shared.engine import (
    ContextLengthError,
    Delta,
    EngineDeadError,
    GenerateResult,
    QueueFullError,
    RequestError,
    RequestFailedError,
    SamplingParams,
    SetupError,
)
from tests.serving import wait_until
from tests.stepped import Arrival, idle, new_engine, token_ids
from tests.stepped import run as run_arrivals
from tests.tiny import byte_tokenizer

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [bytes(range(65, 65 + n)).decode() for n in (1, 2, 3, 5, 9, 17, 33)]


@pytest.fixture(scope="module")
def baseline(tiny_checkpoint) -> BaselineEngine:
    return BaselineEngine(EngineConfig(model=str(tiny_checkpoint)))


@pytest.fixture(scope="module")
def expected(baseline) -> dict[str, list[int]]:
    """Chapter 1's tokens, as many as any test asks for; a shorter answer is its beginning."""
    return {prompt: baseline.generate(prompt, 24, GREEDY).token_ids for prompt in PROMPTS}


@pytest.fixture
def engine(tiny_checkpoint) -> Iterator[AsyncEngine]:
    engine = new_engine(tiny_checkpoint, AsyncEngine, max_num_seqs=3, max_num_batched_tokens=8)
    yield engine
    engine.close()


async def collect(stream) -> list[Delta]:
    return [delta async for delta in stream]


# --- the same tokens, whatever happens around -------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4, 16, 512])
def test_prompts_in_chunks_of_any_size_give_the_same_tokens(tiny_checkpoint, expected, chunk: int):
    """Chunks of 1, of several, and larger than the prompt; alone, so that the chunk is the whole budget."""
    engine = new_engine(tiny_checkpoint, AsyncEngine, max_num_seqs=1, max_num_batched_tokens=chunk)
    for prompt in PROMPTS:
        assert engine.generate(prompt, 12, GREEDY).token_ids == expected[prompt][:12]
    engine.close()


@pytest.mark.parametrize("budget", [3, 4, 16, 512])
def test_chunks_and_decodes_in_one_pass_give_the_same_tokens(tiny_checkpoint, expected, budget: int):
    engine = new_engine(tiny_checkpoint, AsyncEngine, max_num_seqs=3, max_num_batched_tokens=budget)
    for result, prompt in zip(engine.generate_batch(PROMPTS * 2, GREEDY), PROMPTS * 2, strict=True):
        assert result.token_ids == expected[prompt][:12]
    assert idle(engine)
    engine.close()


arrivals = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS),
        st.integers(1, 20),  # tokens
        st.integers(0, 6),  # steps until it arrives, after the one before
        st.one_of(st.none(), st.integers(0, 12)),  # deltas after which it is aborted
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals)
def test_random_arrivals_lengths_and_aborts(engine, expected, requests):
    """Invariant 1, and that nothing is left behind."""
    steps = list(itertools.accumulate(after for _, _, after, _ in requests))
    arrivals = [
        Arrival(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), step, abort_after)
        for (prompt, tokens, _, abort_after), step in zip(requests, steps, strict=True)
    ]
    for arrival, deltas in zip(arrivals, run_arrivals(engine, arrivals), strict=True):
        got = token_ids(deltas)
        if arrival.abort_after is None:
            assert got == expected[arrival.prompt][: arrival.params.max_tokens]
            assert deltas[-1].finish_reason == "length"
        else:
            assert got == expected[arrival.prompt][: len(got)]
    assert idle(engine)


def test_seeded_sampling_is_the_same_whoever_else_is_there(engine, baseline):
    params = SamplingParams(max_tokens=10, temperature=1.5, top_p=0.9, seed=5, ignore_eos=True)
    for result, prompt in zip(engine.generate_batch(PROMPTS, params), PROMPTS, strict=True):
        assert result.token_ids == baseline.generate(prompt, params=params).token_ids


# --- scheduling -------------------------------------------------------------------------------------------------------


class FakeRoom:
    def __init__(self, slots: int) -> None:
        self.free = set(range(slots))

    def admit(self, seq: ScheduledSequence) -> bool:
        if not self.free:
            return False
        seq.slot = self.free.pop()
        return True

    def release(self, seq: ScheduledSequence) -> None:
        if seq.slot is not None:
            self.free.add(seq.slot)
            seq.slot = None


def sequence(prompt_tokens: int, max_tokens: int = 5) -> ScheduledSequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return ScheduledSequence([1] * prompt_tokens, params, byte_tokenizer(), 1000)


def run(scheduler: Scheduler, step: list[tuple[ScheduledSequence, int]]) -> None:
    """Do to the sequences what an engine does after a pass."""
    for seq, count in step:
        seq.computed += count
        if seq.left == 0:
            seq.append(65)
            if seq.finished:
                scheduler.remove(seq)


def test_decodes_come_first_and_a_long_prompt_gets_what_is_left():
    scheduler = Scheduler(FakeRoom(4), 4, token_budget=10)
    short, long = sequence(3), sequence(100)
    scheduler.add(short)
    run(scheduler, scheduler.schedule())
    scheduler.add(long)
    for _ in range(4):
        step = scheduler.schedule()
        assert step == [(short, 1), (long, 9)]
        run(scheduler, step)
    assert short.finished
    assert scheduler.schedule() == [(long, 10)]


def test_first_come_first_served_and_nobody_overtakes():
    scheduler = Scheduler(FakeRoom(2), 2, token_budget=4)
    a, b, c = sequence(6), sequence(1), sequence(1)
    for seq in (a, b, c):
        scheduler.add(seq)
    step = scheduler.schedule()
    assert step == [(a, 4)]  # the budget is spent; b waits
    run(scheduler, step)
    step = scheduler.schedule()
    assert step == [(a, 2), (b, 1)]
    run(scheduler, step)
    assert list(scheduler.waiting) == [c]  # two run already


def test_500_random_steps_keep_the_books():
    rng = random.Random(3)
    room = FakeRoom(5)
    scheduler = Scheduler(room, 5, token_budget=16)
    alive: list[ScheduledSequence] = []
    for _ in range(500):
        for _ in range(rng.choice((0, 0, 1, 2))):
            alive.append(sequence(rng.randint(1, 40), rng.randint(1, 9)))
            scheduler.add(alive[-1])
        if alive and rng.random() < 0.2:
            scheduler.remove(rng.choice(alive))  # an abort, in any state
            scheduler.remove(alive[-1])
            alive = [seq for seq in alive if seq in scheduler.waiting or seq in scheduler.running]
        step = scheduler.schedule()
        assert sum(count for _, count in step) <= 16
        assert len({seq for seq, _ in step}) == len(step)
        assert all(seq in dict(step) for seq in scheduler.running if seq.left == 1), "a decode was left out"
        run(scheduler, step)
        alive = [seq for seq in alive if not seq.finished]
        scheduler.check_integrity(alive)
        assert len(room.free) + len(scheduler.running) == 5


def test_a_step_does_not_depend_on_how_many_wait():
    """Searching or copying the queue would show, by the number of those that are looked at."""
    scheduler = Scheduler(FakeRoom(1), 1, token_budget=16)
    for _ in range(10_000):
        scheduler.add(sequence(1, 2))
    looked_at = 0

    class Counting(type(scheduler.waiting)):
        def __iter__(self):
            nonlocal looked_at
            for seq in super().__iter__():
                looked_at += 1
                yield seq

    scheduler.waiting = Counting(scheduler.waiting)
    looked_at = 0
    for _ in range(20):
        run(scheduler, scheduler.schedule())
    assert looked_at <= 40


# --- the engine's life ------------------------------------------------------------------------------------------------


def test_the_first_token_of_a_running_request_never_waits_for_the_queue(engine, expected):
    """40 clients at once, 3 running: those that run stream while the others wait."""

    async def scenario() -> None:
        await engine.start()
        streams = [engine.submit(f"r{i}", engine.encode_prompt(PROMPTS[i % len(PROMPTS)]), GREEDY) for i in range(40)]
        first_at, done_at = {}, {}

        async def read(i: int) -> None:
            token_ids = []
            async for delta in streams[i]:
                first_at.setdefault(i, time.perf_counter())
                token_ids += delta.token_ids
            done_at[i] = time.perf_counter()
            assert token_ids == expected[PROMPTS[i % len(PROMPTS)]][:12]

        await asyncio.gather(*(read(i) for i in range(40)))
        assert first_at[0] < min(done_at.values()), "the first had to wait for another's end"
        assert max(first_at[i] for i in range(3)) < min(first_at[i] for i in range(9, 40)), "the queue was overtaken"
        await engine.shutdown()

    asyncio.run(scenario())
    assert idle(engine)


@pytest.mark.parametrize("when", ["waiting", "mid-prefill", "running", "finished", "unknown"])
def test_an_abort_is_good_in_every_state_and_twice(engine, when: str):
    engine._error = None
    items: list = []
    others: list[list] = [[] for _ in range(3)]
    if when == "waiting":
        for n, other in enumerate(others):
            engine._submit(f"o{n}", other.append, [65] * 3, GREEDY)
        engine._read_inbox()
        engine.step()
    engine._submit("r", items.append, [66] * 20, SamplingParams(max_tokens=3, ignore_eos=True))
    engine._read_inbox()
    steps = {"waiting": 1, "mid-prefill": 1, "running": 3, "finished": 6, "unknown": 6}[when]
    for _ in range(steps):
        if engine.scheduler.has_work:
            engine.step()
    for _ in range(2):
        engine.abort("r" if when != "unknown" else "nobody")
        if not engine._inbox.empty():
            engine._read_inbox()
    while engine.scheduler.has_work:
        engine.step()
    assert items[-1] is None
    assert items.count(None) == 1
    tokens = sum(len(delta.token_ids) for delta in items[:-1])
    assert tokens == {"waiting": 0, "mid-prefill": 0, "running": 1, "finished": 3, "unknown": 3}[when]
    assert all(sum(len(d.token_ids) for d in other[:-1]) == 12 for other in others if other)
    assert idle(engine)


def test_an_abort_stops_a_pass_that_nobody_waits_for(engine):
    """A chunk of a long prompt takes seconds on a real model: it is given up between two layers."""
    engine._error = None
    items: list = []
    engine._submit("r", items.append, [65] * 5, GREEDY)
    engine._read_inbox()
    attend, layers = engine.cache.attend, []

    def abort_in_layer_0(layer, q, k, v):
        layers.append(layer)
        engine.abort("r")
        return attend(layer, q, k, v)

    engine.cache.attend = abort_in_layer_0
    engine.step()
    assert layers == [0]
    engine._read_inbox()
    assert items == [None]
    engine.cache.attend = attend
    assert idle(engine)


def test_one_of_three_requests_fails_alone(engine, baseline, expected, monkeypatch: pytest.MonkeyPatch):
    """Its neighbours go on, and the numbers that were drawn for them in vain are drawn again."""
    import ch09_async_scheduling.engine as chapter

    real = chapter._script.sample

    def sample(logits, sequences):
        result = real(logits, sequences)  # the neighbours' numbers are drawn
        if any(seq.params.seed == 13 and len(seq.output_ids) == 4 for seq in sequences):
            raise ValueError("a secret")
        return result

    monkeypatch.setattr(chapter._script, "sample", sample)
    params = [SamplingParams(max_tokens=12, temperature=1.2, seed=seed, ignore_eos=True) for seed in (7, 13, 21)]
    wanted = [baseline.generate("Hello", params=p).token_ids for p in params]
    engine._error = None
    items: list[list] = [[], [], []]
    for i, p in enumerate(params):
        engine._submit(f"r{i}", items[i].append, engine.encode_prompt("Hello"), p)
    engine._read_inbox()
    while engine.scheduler.has_work:
        engine.step()
    for i in (0, 2):
        assert [t for d in items[i][:-1] for t in d.token_ids] == wanted[i]
    failure = items[1][-2]
    assert isinstance(failure, RequestFailedError)
    assert "secret" not in str(failure)
    assert [t for d in items[1][:-2] for t in d.token_ids] == wanted[1][:4]
    assert idle(engine)
    assert engine.error() is None


def test_a_loop_that_dies_is_seen_by_everybody_at_once(engine, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        await engine.start()
        streams = [engine.submit(f"r{i}", [65, 66], GREEDY) for i in range(6)]
        monkeypatch.setattr(engine, "forward", lambda *args: 1 / 0)
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(collect(stream), 5)
        assert engine.error() is not None
        with pytest.raises(EngineDeadError):
            engine.submit("late", [65], GREEDY)
        await engine.shutdown()

    asyncio.run(scenario())
    assert idle(engine)


def test_the_queue_is_bounded_and_the_bound_is_exact(tiny_checkpoint):
    engine = new_engine(tiny_checkpoint, AsyncEngine, max_num_seqs=1, max_num_batched_tokens=8, max_waiting=3)
    engine._error = None
    for i in range(3):
        engine._submit(f"r{i}", [].append, [65], GREEDY)
    with pytest.raises(QueueFullError, match="3"):
        engine._submit("r3", [].append, [65], GREEDY)
    engine._read_inbox()
    engine.step()  # one runs now: there is room for one more
    assert (engine.stats().running, engine.stats().waiting) == (1, 2)
    with pytest.raises(QueueFullError):
        engine._submit("r4", [].append, [65], SamplingParams(n=2))
    engine._submit("r5", [].append, [65], GREEDY)
    with pytest.raises(RequestError, match="MAX_WAITING=3"):
        engine._submit("r6", [].append, [65], SamplingParams(n=4))
    with pytest.raises(RequestError, match="open already"):
        engine._submit("r5", [].append, [65], GREEDY)
    with pytest.raises(ContextLengthError):
        engine._submit("r7", [].append, [65] * 1000, GREEDY)


def test_a_batch_larger_than_the_queue_is_run_nevertheless(tiny_checkpoint, expected):
    engine = new_engine(tiny_checkpoint, AsyncEngine, max_num_seqs=2, max_num_batched_tokens=8, max_waiting=3)
    results = engine.generate_batch(PROMPTS * 3, GREEDY)
    assert [result.token_ids for result in results] == [expected[prompt][:12] for prompt in PROMPTS * 3]
    engine.close()


def test_a_thousand_requests_of_which_a_third_is_aborted_leave_nothing_behind(tiny_checkpoint):
    engine = new_engine(tiny_checkpoint, AsyncEngine, max_num_seqs=8, max_num_batched_tokens=64, max_waiting=2000)
    rng = random.Random(0)

    async def one(number: int) -> None:
        params = SamplingParams(max_tokens=rng.randint(1, 6), ignore_eos=True)
        stream, seen = engine.submit(f"r{number}", [65] * rng.randint(1, 30), params), 0
        async for delta in stream:
            seen += len(delta.token_ids)
            if number % 3 == 0 and seen == rng.randint(1, 3):
                engine.abort(f"r{number}")
        assert number % 3 == 0 or seen == params.max_tokens

    async def scenario() -> None:
        await engine.start()
        tasks = [asyncio.create_task(one(number)) for number in range(1000)]
        await asyncio.sleep(0)
        for number in range(0, 1000, 9):
            engine.abort(f"r{number}")
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
        await asyncio.to_thread(wait_until, lambda: idle(engine))
        assert engine._inbox.empty()
        await engine.shutdown()

    asyncio.run(scenario())
    assert threading.active_count() < 20


def test_shutdown_ends_what_is_open_with_an_error_and_can_be_repeated(engine):
    async def scenario() -> None:
        await engine.start()
        streams = [engine.submit(f"r{i}", [65] * 20, SamplingParams(max_tokens=100, ignore_eos=True)) for i in range(5)]
        await anext(streams[0])
        await asyncio.wait_for(engine.shutdown(), 5)
        await engine.shutdown()
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(collect(stream), 5)
        with pytest.raises(EngineDeadError):
            engine.submit("late", [65], GREEDY)
        await engine.start()  # and can be started again
        assert sum(len(d.token_ids) for d in await collect(engine.submit("again", [65], GREEDY))) == 12
        await engine.shutdown()

    asyncio.run(scenario())
    assert idle(engine)


def test_an_idle_engine_uses_no_cpu(engine):
    engine.generate("Hello", 2)
    process = psutil.Process()
    wait_until(lambda: idle(engine))
    threads = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    native = engine._thread.native_id
    assert native in threads
    inbox = engine._inbox
    assert inbox.empty()
    before = threads[native]
    time.sleep(0.5)  # what is measured is what happens in it: nothing
    after = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}[native]
    assert after - before <= 0.02


def test_offline_results_are_whole(engine):
    result = engine.generate("Hello", 5, SamplingParams(ignore_eos=True, logprobs=2))
    assert isinstance(result, GenerateResult)
    assert len(result.logprobs) == len(result.token_ids) == 5
    assert result.metrics.ttft_ms > 0


# --- settings ---------------------------------------------------------------------------------------------------------


def test_a_budget_below_the_number_of_sequences_is_refused():
    with pytest.raises(
        SetupError, match=r"^MAX_NUM_BATCHED_TOKENS=4 is less than MAX_NUM_SEQS=8, .*lower the other\.$"
    ):
        AsyncConfig(max_num_batched_tokens=4, max_num_seqs=8)


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers(tiny_checkpoint, monkeypatch: pytest.MonkeyPatch):
    import ch09_async_scheduling.slot_cache as slot_cache

    monkeypatch.setattr(slot_cache, "free_memory", lambda device: 100_000)
    with pytest.raises(SetupError, match=r"MAX_NUM_SEQS=4 slots of MAX_MODEL_LEN=128 .* \(256 bytes a token\).*80%"):
        new_engine(tiny_checkpoint, AsyncEngine, max_num_seqs=4)


def test_a_trace_that_can_not_be_written_is_refused(tiny_checkpoint, tmp_path):
    with pytest.raises(SetupError, match="TRACE="):
        new_engine(tiny_checkpoint, AsyncEngine, trace=str(tmp_path / "no" / "such" / "file"))


def test_slots_are_handed_out_lowest_first_and_refused_when_all_are_used(tiny_checkpoint):
    from shared.model import ModelConfig

    cache = SlotCache(ModelConfig.from_folder(tiny_checkpoint), 2, 16, torch.float32, torch.device("cpu"))
    a, b, c = sequence(1), sequence(1), sequence(1)
    assert cache.admit(a)
    assert cache.admit(b)
    assert not cache.admit(c)
    assert (a.slot, b.slot, c.slot) == (0, 1, None)
    cache.release(a)
    cache.release(a)
    assert cache.admit(c)
    assert (c.slot, cache.num_used) == (0, 2)
