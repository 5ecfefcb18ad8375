"""The traffic of the benchmarks: the same for a seed, and distributed as it claims."""

import dataclasses
import itertools
import math
import random
import statistics

import pytest

from shared.checkpoint import MODELS
from shared.tokenizer import Tokenizer
from shared.workload import (
    CLIP,
    SIGMA,
    WORDS,
    Conversation,
    Turn,
    WorkloadConfig,
    batch,
    closed_loop,
    realistic,
    warm_up,
)

MANY = WorkloadConfig(requests=4000, prompt_tokens=100, output_tokens=40, rate=5.0, multi_turn=0.0, seed=3)


def all_turns(workload) -> list[Turn]:
    return [turn for conversation in workload.conversations for turn in conversation.turns]


@pytest.mark.parametrize("make", [batch, realistic, lambda config: closed_loop(config, 4)])
def test_the_seed_alone_decides(make):
    """Drawing from the global generator gave other traffic after an import that draws too."""
    random.seed(1)
    first = make(WorkloadConfig(seed=7))
    random.seed(2)
    assert make(WorkloadConfig(seed=7)) == first
    assert make(WorkloadConfig(seed=8)) != first


def test_making_traffic_leaves_the_global_generator_alone():
    """Seeding the global generator would make a sampled benchmark run repeat itself."""
    random.seed(5)
    expected = random.random()
    random.seed(5)
    realistic(WorkloadConfig())
    assert random.random() == expected


def test_no_load_repeats_prompts_of_another():
    """A prefix cache keeps the prompts of one load, and would make the next one look faster than it is."""
    config = WorkloadConfig(requests=16, prompt_tokens=16, concurrency=(1, 2, 4))
    loads = [warm_up(config, 4), batch(config), realistic(config), *(closed_loop(config, c) for c in (1, 2, 4))]
    beginnings = [" ".join(turn.prompt.split()[:4]) for workload in loads for turn in all_turns(workload)]
    assert len(set(beginnings)) == len(beginnings)


def test_another_rate_leaves_the_prompts_as_they_were():
    """One generator for everything would compare two rates on different prompts."""
    slow, fast = (realistic(WorkloadConfig(rate=rate)) for rate in (1.0, 4.0))
    assert all_turns(slow) == all_turns(fast)
    assert slow.conversations[-1].arrival_s == pytest.approx(4 * fast.conversations[-1].arrival_s)


def test_fixed_loads_have_the_lengths_that_were_asked_for():
    config = WorkloadConfig(requests=5, prompt_tokens=12, output_tokens=9)
    for workload, requests in ((batch(config), 5), (closed_loop(config, 2), 5), (closed_loop(config, 4), 8)):
        assert workload.requests == requests  # a closed loop: at least two a client
        assert all(len(turn.prompt.split()) == 12 and turn.max_tokens == 9 for turn in all_turns(workload))
        assert all(conversation.arrival_s == 0 for conversation in workload.conversations)


def test_arrivals_are_a_poisson_process():
    """Its gaps are exponential: mean and standard deviation are both 1 / rate. Even gaps would have deviation 0."""
    arrivals = [conversation.arrival_s for conversation in realistic(MANY).conversations]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert arrivals[0] == 0
    assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1 / 5, rel=0.1)


def test_lengths_are_log_normal_within_the_clips():
    """Taking the median for the logarithm's mean, or the clips for the spread, shifts these by more than they allow."""
    turns = all_turns(realistic(MANY))
    for lengths, median in (([len(t.prompt.split()) for t in turns], 100), ([t.max_tokens for t in turns], 40)):
        logs = [math.log(length) for length in lengths]
        assert statistics.median(lengths) == pytest.approx(median, rel=0.05)
        assert statistics.stdev(logs) == pytest.approx(SIGMA, rel=0.08)
        assert median / CLIP <= min(lengths) <= max(lengths) <= median * CLIP
        assert max(lengths) > 3 * median


def test_shares_are_what_was_asked_for():
    config = dataclasses.replace(MANY, multi_turn=0.3, shared_prefix=0.2, system_tokens=10, think_time=2.0)
    conversations = realistic(config).conversations
    systems = [conversation.system for conversation in conversations if conversation.system is not None]
    several = [conversation for conversation in conversations if len(conversation.turns) > 1]
    assert len(systems) / len(conversations) == pytest.approx(0.2, abs=0.03)
    assert len(several) / len(conversations) == pytest.approx(0.3, abs=0.03)
    assert len(set(systems)) == 1
    assert len(systems[0].split()) == 10
    assert {len(conversation.turns) for conversation in several} == {2, 3, 4}
    assert all(conversation.turns[0].think_s == 0 for conversation in conversations)
    thinking = [turn.think_s for conversation in several for turn in conversation.turns[1:]]
    assert statistics.mean(thinking) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(("multi_turn", "most"), [(0.0, 1), (1.0, 4)])
def test_the_number_of_requests_is_exact(multi_turn, most):
    """Counting conversations instead of requests sent up to four times as many as asked for."""
    workload = realistic(WorkloadConfig(requests=50, multi_turn=multi_turn))
    assert workload.requests == len(all_turns(workload)) == 50
    assert max(len(conversation.turns) for conversation in workload.conversations) == most


def test_a_later_turn_has_the_actual_answer_before_it():
    """Made-up answers would never match what a prefix cache has kept of the turn before."""
    conversation = Conversation((Turn("one", 5), Turn("two", 5), Turn("three", 5)), system="be brief")
    assert conversation.messages([]) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
    ]
    assert conversation.messages(["1", "2"]) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "three"},
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 0},
        {"prompt_tokens": 0},
        {"output_tokens": -1},
        {"concurrency": ()},
        {"concurrency": (4, 0)},
        {"rate": 0.0},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"think_time": -1.0},
        {"shared_prefix": 1.5},
        {"multi_turn": float("nan")},
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("_", "-")):
        WorkloadConfig(**wrong)


def test_a_word_is_a_token(real_model):
    """Lengths are asked for in tokens and made of words: a word of two tokens would make them longer."""
    tokenizer = Tokenizer(MODELS / real_model)
    assert [word for word in WORDS if len(tokenizer.encode(word)) != 1 or len(tokenizer.encode(f" {word}")) != 1] == []
