"""Chapter 10's engine: blocks that run out, are shared, copied and found again, and not one token that differs."""

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ch01_baseline.engine import BaselineEngine
from ch10_paged_cache.engine import PagedConfig, PagedEngine
from shared.config import EngineConfig
from shared.engine import Message, RequestError, SamplingParams, SetupError
from tests.stepped import Arrival, idle, new_engine, run, token_ids

TEXT = "The quick brown fox jumps over the lazy dog, twice."
PROMPTS = [TEXT[:n] for n in (1, 3, 4, 5, 8, 9, 17, 33)]


@pytest.fixture(scope="module")
def baseline(tiny_checkpoint) -> BaselineEngine:
    return BaselineEngine(EngineConfig(model=str(tiny_checkpoint)))


@pytest.fixture(scope="module")
def expected(baseline):
    """Chapter 1's tokens for a prompt, remembered."""
    memory: dict[tuple[str, SamplingParams], list[int]] = {}

    def of(prompt: str, params: SamplingParams) -> list[int]:
        if (prompt, params) not in memory:
            memory[prompt, params] = baseline.generate(prompt, params=params).token_ids
        return memory[prompt, params]

    return of


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def paged(checkpoint, **settings_) -> PagedEngine:
    return new_engine(checkpoint, PagedEngine, **{"max_num_seqs": 4, "max_num_batched_tokens": 16, **settings_})


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("spare", [0, 3, 1000])
def test_any_block_size_and_pool_size_gives_the_same_tokens(
    tiny_checkpoint, expected, block_size, prefix_caching, spare
):
    """Invariant 1 with pools so small that sequences are preempted, by the counter."""
    longest = -(-(33 + 19) // block_size)
    engine = paged(tiny_checkpoint, block_size=block_size, num_blocks=longest + spare, prefix_caching=prefix_caching)
    for seed in (None, 7):
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0 if seed is None else 1.3, seed=seed)
        arrivals = [Arrival(prompt, params, step) for step, prompt in enumerate(PROMPTS + PROMPTS[::-1])]
        for arrival, deltas in zip(arrivals, run(engine, arrivals), strict=True):
            assert token_ids(deltas) == expected(arrival.prompt, params)
            assert "".join(delta.text for delta in deltas)
    if spare == 0:
        assert engine.stats().preemptions > 0
    if spare == 1000:
        assert engine.stats().preemptions == 0
    assert (engine.stats().prefix_cache_hit_tokens > 0) == prefix_caching
    assert idle(engine)


requests = st.lists(
    st.tuples(
        st.integers(0, len(TEXT) - 1),  # where the prompt leaves the common text
        st.text("abc", max_size=6),  # and goes its own way
        st.integers(1, 16),  # tokens
        st.integers(0, 5),  # steps until it arrives, after the one before
        st.one_of(st.none(), st.none(), st.integers(0, 9)),  # deltas after which it is aborted
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=requests, block_size=st.sampled_from([1, 4, 16]), budget=st.sampled_from([4, 16, 512]))
def test_random_arrivals_with_common_beginnings(tiny_checkpoint, expected, requests, block_size, budget):
    longest = -(-(len(TEXT) + 6 + 16) // block_size)
    engine = paged(tiny_checkpoint, block_size=block_size, num_blocks=longest + 2, max_num_batched_tokens=budget)
    steps = itertools.accumulate(after for *_, after, _ in requests)
    arrivals = [
        Arrival(TEXT[: cut + 1] + tail, greedy(tokens), step, abort_after)
        for (cut, tail, tokens, _, abort_after), step in zip(requests, steps, strict=True)
    ]
    for arrival, deltas in zip(arrivals, run(engine, arrivals), strict=True):
        wanted = expected(arrival.prompt, greedy(16))[: arrival.params.max_tokens]
        got = token_ids(deltas)
        assert got == (wanted if arrival.abort_after is None else wanted[: len(got)])
    assert idle(engine)


def test_500_random_steps_with_a_small_pool_keep_the_books(tiny_checkpoint):
    """check_integrity runs after each of them: free + cached + in use == all blocks."""
    rng = random.Random(1)
    engine = paged(tiny_checkpoint, block_size=4, num_blocks=20)
    arrivals = [
        Arrival(
            TEXT[: rng.randint(1, 40)] + "xyz"[: rng.randint(0, 3)],
            SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True, n=rng.choice((1, 1, 1, 2, 3))),
            step=3 * number,
            abort_after=rng.choice((None, None, rng.randint(0, 20))),
        )
        for number in range(170)
    ]
    run(engine, arrivals)
    assert engine.stats().preemptions > 10
    assert idle(engine)


@pytest.mark.parametrize("length", range(1, 13))
def test_a_common_beginning_of_any_length_is_found_and_changes_nothing(tiny_checkpoint, expected, length: int):
    """Around the borders of blocks of 4; a prompt that is cached whole still has its last token computed."""
    engine = paged(tiny_checkpoint, block_size=4)
    first, second = TEXT[:12], TEXT[:length] + ("" if length == 12 else "§")
    run(engine, [Arrival(first, greedy(5))])
    before = engine.stats().prefix_cache_hit_tokens
    [deltas] = run(engine, [Arrival(second, greedy(5))])
    assert token_ids(deltas) == expected(second, greedy(5))
    found = (length if length < 12 else 11) // 4 * 4
    assert engine.stats().prefix_cache_hit_tokens - before == found
    assert deltas[-1].metrics.cached_tokens == found


def test_two_equal_prompts_in_one_step(tiny_checkpoint, expected):
    """Neither finds the other's blocks yet; both write, and one of each pair stays known."""
    engine = paged(tiny_checkpoint, block_size=4, max_num_batched_tokens=64)
    for deltas in run(engine, [Arrival(TEXT[:20], greedy(8))] * 2):
        assert token_ids(deltas) == expected(TEXT[:20], greedy(8))
    assert idle(engine)


@pytest.mark.parametrize("num_blocks", [14, 100])
@pytest.mark.parametrize("length", [3, 4, 5, 8])
@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_choices_share_the_prompt_and_copy_what_they_write_into(
    tiny_checkpoint, baseline, num_blocks: int, length: int, max_num_seqs: int
):
    """n > 1: one prefill, and each choice its own seed's text. Also when the choices don't all fit at once."""
    engine = paged(tiny_checkpoint, block_size=4, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    params = SamplingParams(max_tokens=20, temperature=1.5, seed=3, n=4, ignore_eos=True, logprobs=1)
    computed = []
    forward = engine.forward
    engine.forward = lambda plan, wanted: computed.append(plan) or forward(plan, wanted)
    [deltas] = run(engine, [Arrival(TEXT[:length], params)])
    for k, result in enumerate(baseline.generate_batch([TEXT[:length]], params)):
        assert token_ids([delta for delta in deltas if delta.index == k]) == result.token_ids
    if num_blocks == 100 and max_num_seqs == 8:
        assert sum(len(plan.token_ids) for plan in computed) == length + 4 * 19, "the prompt was computed once"
        copies = sum(len(plan.copies) for plan in computed)
        assert copies == (0 if length % 4 == 0 else 3), "all but the last to write copy the block that isn't full"
    assert idle(engine)


def test_scored_prompts_are_computed_whole(tiny_checkpoint, baseline):
    """A cached beginning has no logits; its scores would be missing."""
    engine = paged(tiny_checkpoint, block_size=4)
    params = SamplingParams(max_tokens=3, prompt_logprobs=1, n=2, ignore_eos=True)
    for _ in range(2):
        [deltas] = run(engine, [Arrival(TEXT[:13], params)])
        for k in range(2):
            first = next(delta for delta in deltas if delta.index == k)
            expected = baseline.generate(TEXT[:13], params=params.for_choice(k)).prompt_logprobs
            assert [e and e.token_id for e in first.prompt_logprobs] == [e and e.token_id for e in expected]


def test_what_could_never_fit_is_refused_with_the_numbers(tiny_checkpoint):
    engine = paged(tiny_checkpoint, block_size=4, num_blocks=5)
    engine.check_request([65] * 11, greedy(10))  # 20 tokens of cache: the last of an answer isn't stored
    with pytest.raises(RequestError, match=r"21 tokens of cache, 6 blocks of 4, and the pool has 5") as refused:
        engine.check_request([65] * 12, greedy(10))
    assert refused.value.param == "max_tokens"


def test_a_pool_that_does_not_fit_is_refused(tiny_checkpoint):
    with pytest.raises(SetupError, match="NUM_BLOCKS=1000000000 blocks of 16 tokens take"):
        paged(tiny_checkpoint, num_blocks=1_000_000_000)
    with pytest.raises(SetupError, match="BLOCK_SIZE=0"):
        PagedConfig(block_size=0)


def test_the_pool_follows_the_free_memory(tiny_checkpoint, monkeypatch: pytest.MonkeyPatch):
    import ch10_paged_cache.engine as chapter

    engine = paged(tiny_checkpoint)
    assert engine.blocks.num_blocks == 4 * 128 // 16  # all four at their longest
    monkeypatch.setattr(chapter._script, "free_memory", lambda device: 10 * engine.bytes_per_block())
    assert paged(tiny_checkpoint).blocks.num_blocks == 5  # half of it
    monkeypatch.setattr(chapter._script, "free_memory", lambda device: 100)
    with pytest.raises(SetupError, match="a block takes"):
        paged(tiny_checkpoint)


def test_a_conversation_finds_its_earlier_turns(tiny_checkpoint):
    engine = paged(tiny_checkpoint, block_size=4, max_num_batched_tokens=128)
    messages = [Message(role="user", content="one two three")]
    run(engine, [Arrival(engine.build_prompt(messages), greedy(6))])
    earlier = len(engine.encode_prompt(engine.build_prompt(messages)))
    messages += [Message(role="assistant", content="four"), Message(role="user", content="five")]
    [deltas] = run(engine, [Arrival(engine.build_prompt(messages), greedy(6))])
    assert deltas[-1].metrics.cached_tokens == earlier // 4 * 4
