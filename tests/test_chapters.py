"""What holds for all chapters: every later one gives chapter 1's tokens, alone and in any batch. A line a chapter."""

import importlib
import threading
from dataclasses import replace

import pytest

from ch01_baseline.engine import BaselineEngine
from shared.config import EngineConfig
from shared.engine import BaseOfflineEngine, ContextLengthError, GenerateResult, Message, RequestError, SamplingParams
from tests.tiny import greedy_by_transformers

CHAPTERS = {
    "ch05_kv_cache": "KVCacheEngine",
    "ch09_async_scheduling": "AsyncEngine",
    "ch10_paged_cache": "PagedEngine",
    "ch11_quant_tp": "Engine",
}

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
LENGTHS = (1, 2, 3, 9, 17)
PROMPTS = ["x" * n for n in LENGTHS] + ["Hello", "hi 😀é", "The quick brown fox. " * 3]

REAL_PROMPTS = [
    "Hello",
    "What is the capital of France?",
    "Count to ten.",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Translate 'good morning' into German.",
    "1, 1, 2, 3, 5, 8,",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
    "List three colours.",
    "Ünïcödé täxt 😀",
    "a",
    "The opposite of hot is",
    "What is 12 times 12?",
    "Name a planet.",
    "    indented\n\n\ttext",
    "SELECT * FROM",
    "Tell me a joke about cats.",
    "Once upon a time, in a village by the river, there lived",
    "word " * 150,
]


@pytest.fixture(scope="module")
def baseline(tiny_checkpoint) -> BaseOfflineEngine:
    return BaselineEngine(EngineConfig(model=str(tiny_checkpoint)))


@pytest.fixture(scope="module", params=CHAPTERS)
def engine(request: pytest.FixtureRequest, tiny_checkpoint) -> BaseOfflineEngine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL", str(tiny_checkpoint))
        patch.setenv("MAX_NUM_SEQS", "5")
        return getattr(importlib.import_module(f"{request.param}.engine"), CHAPTERS[request.param])()


def same(results: list[GenerateResult], expected: list[GenerateResult]) -> None:
    for result, other in zip(results, expected, strict=True):
        assert (result.token_ids, result.text, result.finish_reason) == (
            other.token_ids,
            other.text,
            other.finish_reason,
        )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_chapter_1_s(engine, baseline, prompt: str):
    same([engine.generate(prompt, params=GREEDY)], [baseline.generate(prompt, params=GREEDY)])


def test_a_batch_of_different_lengths_is_each_of_them_alone(engine, baseline):
    """Rows that see their neighbours' keys, or positions counted from the batch's longest."""
    same(engine.generate_batch(PROMPTS, GREEDY), [baseline.generate(prompt, params=GREEDY) for prompt in PROMPTS])


def test_a_batch_of_equal_lengths_is_each_of_them_alone(engine, baseline):
    prompts = ["one", "two", "six", "ten"]
    same(engine.generate_batch(prompts, GREEDY), [baseline.generate(prompt, params=GREEDY) for prompt in prompts])


def test_rows_that_finish_early_leave_the_others_as_they_are(engine, baseline):
    """Each ends at another step: with its end-of-sequence token, a stop string, or not at all."""
    drawn = SamplingParams(max_tokens=24, temperature=2.0, seed=2, ignore_eos=True)
    texts = [baseline.generate(prompt, params=drawn).text for prompt in PROMPTS]
    scattered = max(sorted(set("".join(texts))), key=lambda char: len({text.find(char) for text in texts}))
    params = replace(drawn, stop=[scattered])
    expected = [baseline.generate(prompt, params=params) for prompt in PROMPTS]
    assert len({len(result.token_ids) for result in expected}) > 2, "the prompts must end at different steps"
    same(engine.generate_batch(PROMPTS, params), expected)


def test_a_seeded_request_is_the_same_alone_and_in_a_batch(engine, baseline):
    params = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.95, seed=11, n=2)
    batch = engine.generate_batch(PROMPTS, params)
    alone = [engine.generate(prompt, params=params.for_choice(k)) for prompt in PROMPTS for k in range(2)]
    same(batch, alone)
    same(batch, baseline.generate_batch(PROMPTS, params))


def test_streamed_and_whole_results_agree(engine):
    for params in (GREEDY, SamplingParams(max_tokens=7), SamplingParams(max_tokens=9, temperature=1.0, seed=1)):
        deltas = list(engine.stream("Hello", params=params))
        result = engine.generate("Hello", params=params)
        assert "".join(delta.text for delta in deltas) == result.text
        assert [t for delta in deltas for t in delta.token_ids] == result.token_ids
        assert deltas[-1].finish_reason == result.finish_reason
        assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_the_context_ends_with_length(engine, baseline):
    prompt = "x" * (baseline.max_model_len - 5)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    result = engine.generate(prompt, params=params)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 5)
    same([result], [baseline.generate(prompt, params=params)])
    with pytest.raises(ContextLengthError):
        engine.generate("x" * baseline.max_model_len)


def test_logprobs_are_chapter_1_s(engine, baseline):
    params = SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    for mine, reference in zip(
        engine.generate_batch(PROMPTS, params), baseline.generate_batch(PROMPTS, params), strict=True
    ):
        for entries in ("logprobs", "prompt_logprobs"):
            ours, theirs = getattr(mine, entries), getattr(reference, entries)
            assert len(ours) == len(theirs)
            for a, b in zip(ours, theirs, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert a.token_id == b.token_id
                    assert a.logprob == pytest.approx(b.logprob, abs=2e-3)
                    assert [t for t, _ in a.top] == [t for t, _ in b.top]


def test_a_prompt_can_be_scored_without_output(engine, baseline):
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    mine, reference = engine.generate("abc", params=params), baseline.generate("abc", params=params)
    assert mine.token_ids == []
    assert mine.finish_reason == reference.finish_reason == "length"
    assert [e and e.token_id for e in mine.prompt_logprobs] == [e and e.token_id for e in reference.prompt_logprobs]


def test_a_cancelled_stream_ends_between_tokens_and_the_engine_goes_on(engine):
    cancel, seen = threading.Event(), []
    for delta in engine.stream("Hello", 50, SamplingParams(ignore_eos=True), cancel):
        seen.append(delta)
        if len(seen) == 3:
            cancel.set()
    assert len(seen) == 3
    assert seen[-1].finish_reason is None
    assert len(engine.generate("Hello", 4, SamplingParams(ignore_eos=True)).token_ids) == 4


def test_a_batch_with_a_bad_prompt_is_refused_whole(engine):
    with pytest.raises(RequestError, match="empty"):
        engine.generate_batch(["a", ""])


def test_the_whole_conversation_is_in_the_prompt(engine):
    turns = [
        Message(role="user", content="one"),
        Message(role="assistant", content="two"),
        Message(role="user", content="six"),
    ]
    assert engine.build_prompt(turns) == (
        "<|im_start|>user:one<|im_end|><|im_start|>assistant:two<|im_end|><|im_start|>user:six<|im_end|>"
        "<|im_start|>assistant:"
    )


def test_metrics_tell_the_times_of_the_tokens(engine):
    metrics = engine.generate("Hello", 5, SamplingParams(ignore_eos=True)).metrics.as_dict()
    assert {"throughput", "input_tokens", "output_tokens", "ttft_ms", "tpot_ms"} <= set(metrics)
    assert metrics["ttft_ms"] > 0
    assert metrics["tpot_ms"] > 0
    assert "tpot_ms" not in engine.generate("Hello", 1, SamplingParams(ignore_eos=True)).metrics.as_dict()


@pytest.fixture(scope="module")
def expected_of_the_real_model(real_model):
    """Prompts, and ten tokens for each: computed once for all chapters."""
    reference = BaselineEngine(EngineConfig(model=real_model))
    texts = [reference.build_prompt([Message(role="user", content=prompt)]) for prompt in REAL_PROMPTS]
    prompts = [reference.encode_prompt(text) for text in texts]
    return prompts, [greedy_by_transformers(reference, prompt, 10) for prompt in prompts]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_real_model_gives_chapter_1_s_tokens(chapter: str, expected_of_the_real_model):
    """Twenty prompts, alone and in batches, against transformers' own generate, which chapter 1 equals."""
    prompts, expected = expected_of_the_real_model
    engine = getattr(importlib.import_module(f"{chapter}.engine"), CHAPTERS[chapter])()
    results = engine.generate_batch(prompts, SamplingParams(max_tokens=10))
    assert [result.token_ids for result in results] == expected
    assert [engine.generate(prompt, 10).token_ids for prompt in prompts[:4]] == expected[:4]
