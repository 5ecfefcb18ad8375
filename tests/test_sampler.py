"""The sampler: each parameter against values worked out by hand, and rows that don't touch each other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine import RequestFailedError, SamplingParams
from shared.sampler import sample, token_logprobs
from shared.sequence import Sequence
from tests.tiny import IM_END, VOCAB_SIZE, byte_tokenizer

# Probabilities 0.4, 0.3, 0.2, 0.1 for tokens 3, 1, 0, 2 of a vocabulary of 4.
FOUR = torch.tensor([[0.2, 0.3, 0.1, 0.4]]).log()


def sequence(output: tuple[int, ...] = (), prompt: tuple[int, ...] = (0,), **params: object) -> Sequence:
    seq = Sequence(prompt, SamplingParams(**params), byte_tokenizer(), 10_000)
    seq.output_ids = list(output)
    return seq


def draws(logits: torch.Tensor, count: int = 400, **params: object) -> list[int]:
    """Tokens that one sequence draws from the same logits again and again."""
    seq = sequence(temperature=params.pop("temperature", 1.0), seed=1, **params)
    return [sample(logits, [seq])[0][0] for _ in range(count)]


def chosen(logits: list[float], **params: object) -> int:
    return sample(torch.tensor([logits]), [sequence(**params)])[0][0]


def test_temperature_zero_takes_the_most_likely_token():
    assert set(draws(FOUR, 20, temperature=0)) == {3}


def test_top_p_zero_is_greedy_whatever_the_temperature():
    assert set(draws(FOUR, 20, temperature=2, top_p=0)) == {3}


def test_draws_follow_the_probabilities():
    """Within five standard deviations of 4,000 draws."""
    tokens = draws(FOUR, 4000)
    for token, p in enumerate([0.2, 0.3, 0.1, 0.4]):
        assert abs(tokens.count(token) / 4000 - p) < 5 * math.sqrt(p * (1 - p) / 4000)


def test_temperature_divides_the_logits():
    """At temperature 0.5 probabilities are squared: 0.16, 0.09, 0.04, 0.01 of 0.30."""
    tokens = draws(FOUR, 4000, temperature=0.5)
    assert abs(tokens.count(3) / 4000 - 0.16 / 0.30) < 0.04
    assert abs(tokens.count(2) / 4000 - 0.01 / 0.30) < 0.015


@pytest.mark.parametrize(
    ("params", "candidates"),
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {3}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.75}, {0, 1, 3}),
        ({"top_p": 1e-30}, {3}),
        ({"min_p": 0.6}, {1, 3}),  # 0.6 * 0.4 = 0.24
        ({"min_p": 1.0}, {3}),
        ({"top_k": 3, "top_p": 0.7}, {1, 3}),  # of the 0.9 that top-k leaves, 0.4 + 0.3 reach 0.63
        ({"top_k": 2, "min_p": 0.9}, {3}),
    ],
)
def test_filters_leave_these_candidates(params: dict[str, float], candidates: set[int]):
    assert set(draws(FOUR, 300, **params)) == candidates


def test_equal_logits_keep_exactly_k_candidates():
    """A threshold instead of ranks lets every tied token through."""
    assert len(set(draws(torch.zeros(1, 50), 600, top_k=3))) == 3


def test_a_tiny_temperature_does_not_overflow():
    """exp of a logit divided by 1e-4 is infinite unless the largest is taken off first."""
    assert set(draws(FOUR * 1000, 20, temperature=1e-4)) == {3}


def test_presence_penalty_is_taken_once_from_generated_tokens():
    logits = [0.0, 1.0, 0.5]
    assert chosen(logits, output=(1, 1, 1), presence_penalty=0.4) == 1  # 1.0 - 0.4 > 0.5
    assert chosen(logits, output=(1, 1, 1), presence_penalty=0.6) == 2
    assert chosen(logits, prompt=(1,), presence_penalty=2.0) == 1  # the prompt doesn't count


def test_frequency_penalty_is_taken_as_often_as_the_token_came():
    logits = [0.0, 1.0, 0.5]
    assert chosen(logits, output=(1,), frequency_penalty=0.4) == 1
    assert chosen(logits, output=(1, 1), frequency_penalty=0.4) == 2


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    """Dividing a negative logit would reward the repetition."""
    assert chosen([0.0, 3.0, 2.0], prompt=(1,), repetition_penalty=2.0) == 2
    assert chosen([-2.0, -1.0, -1.5], output=(1,), repetition_penalty=2.0) == 2


def test_min_tokens_forbids_the_end_until_then():
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, IM_END], logits[0, 65] = 9.0, 1.0
    assert sample(logits, [sequence(output=(66,), min_tokens=2)])[0][0] == 65
    assert sample(logits, [sequence(output=(66, 66), min_tokens=2)])[0][0] == IM_END


def test_the_logits_are_left_unchanged():
    """Penalties written into the caller's tensor would change its neighbours' or the reported log-probabilities."""
    logits = FOUR.repeat(2, 1)
    before = logits.clone()
    sample(logits, [sequence(output=(3,), presence_penalty=2.0), sequence(temperature=1.0, top_k=2)])
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_unscaled_logits():
    """Not of what temperature, penalties and filters leave."""
    seq = sequence(output=(3,), temperature=0.1, top_k=1, presence_penalty=2.0, logprobs=2)
    [(token, entry)] = sample(FOUR, [seq])
    assert entry is not None
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(math.log([0.2, 0.3, 0.1, 0.4][token]), abs=1e-6)
    assert [token_id for token_id, _ in entry.top] == [3, 1]
    assert entry.top[0][1] == pytest.approx(math.log(0.4), abs=1e-6)


def test_logprobs_of_many_rows_equal_those_of_each_alone():
    """They are computed some rows at a time; the seams must not show."""
    torch.manual_seed(0)
    logits, ids = torch.randn(600, 20), torch.randint(20, (600,)).tolist()
    together = token_logprobs(logits, ids, 3)
    assert together == [token_logprobs(logits[i : i + 1], ids[i : i + 1], 3)[0] for i in range(600)]


def test_the_same_seed_draws_the_same_tokens_and_choices_differ():
    params = SamplingParams(temperature=1.0, seed=7)
    logits = torch.zeros(1, 1000)

    def run(p: SamplingParams) -> list[int]:
        seq = Sequence([1], p, byte_tokenizer(), 1000)
        return [sample(logits, [seq])[0][0] for _ in range(8)]

    assert run(params) == run(params)
    assert run(params.for_choice(1)) != run(params)
    assert run(params.for_choice(1)) == run(SamplingParams(temperature=1.0, seed=8))


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5, -(2**70)])
def test_any_integer_is_a_seed(seed: int):
    """torch takes 64 bits; a client may send more."""
    seq = sequence(temperature=1.0, seed=seed)
    assert seq.generator.initial_seed() % 2**64 == seed % 2**64


PARAMS = st.builds(
    dict,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 3]),
    top_p=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    logprobs=st.sampled_from([None, 2]),
)


@settings(deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_neighbours(rows: list[dict], seed: int):
    """A seeded request gives the same text alone and in any batch."""
    logits = torch.randn(len(rows), 30, generator=torch.Generator().manual_seed(seed))

    def sequences() -> list[Sequence]:
        return [sequence(output=(i, i + 1), seed=seed + i, **row) for i, row in enumerate(rows)]

    alone = [sample(logits[i : i + 1], [seq])[0] for i, seq in enumerate(sequences())]
    assert sample(logits, sequences()) == alone


def test_logits_that_are_not_numbers_are_an_error():
    """argmax of NaN silently gives some token."""
    with pytest.raises(RequestFailedError, match="NaN"):
        sample(torch.tensor([[0.0, math.nan, 1.0]]), [sequence()])
