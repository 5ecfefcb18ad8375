"""Chapter 1's engine: the same tokens as transformers' own greedy generate, one request at a time, stoppable."""

import json
import shutil
import threading

import pytest
import torch

from ch01_baseline.engine import BaselineEngine
from shared.config import EngineConfig
from shared.engine import Message, SamplingParams, SetupError, UnsupportedParameterError
from shared.peer import TransformersPeer
from tests.tiny import IM_END, greedy_by_transformers

PROMPTS = ["a", "Hello", "hi 😀é", "The quick brown fox jumps over the lazy dog. " * 2]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    return BaselineEngine(EngineConfig(model=str(tiny_checkpoint)))


@pytest.fixture(scope="module")
def real_engine(real_model):
    return BaselineEngine(EngineConfig(model=real_model))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_equal_transformers_greedy_generate(engine, prompt: str):
    token_ids = engine.encode_prompt(prompt)
    assert engine.generate(prompt, 24).token_ids == greedy_by_transformers(engine, token_ids, 24)


@pytest.mark.parametrize("question", ["Hello", "What is the capital of France?", "Count: 1, 2, 3,"])
def test_tokens_of_the_real_model_equal_transformers(real_engine, question: str):
    prompt = real_engine.build_prompt([Message(role="user", content=question)])
    token_ids = real_engine.encode_prompt(prompt)
    assert real_engine.generate(prompt, 12).token_ids == greedy_by_transformers(real_engine, token_ids, 12)


def test_the_real_model_answers(real_engine):
    """The weights were unpacked, permuted and tied as they should be: noise would still pass the tests above."""
    prompt = real_engine.build_prompt([Message(role="user", content="What is the capital of France?")])
    assert "Paris" in real_engine.generate(prompt, 12).text


def test_the_real_tokenizer_splits_digits_and_keeps_special_tokens(real_engine):
    """GGUF keeps only the pre-tokenizer's name; without it, two spaces before a number become other tokens."""
    tokenizer = real_engine.tokenizer
    tokens = tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("in  2024"))
    assert tokens == ["in", "ĠĠ", "2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>user") == [1, tokenizer.encode("user")[0]]
    assert tokenizer.decode(tokenizer.encode("naïve 😀 tokens\n\n  x")) == "naïve 😀 tokens\n\n  x"


def test_streamed_deltas_join_to_the_result(engine):
    deltas = list(engine.stream("Hello", 16))
    result = engine.generate("Hello", 16)
    assert "".join(delta.text for delta in deltas) == result.text
    assert [token_id for delta in deltas for token_id in delta.token_ids] == result.token_ids
    assert deltas[-1].finish_reason == result.finish_reason


def test_metrics_are_exactly_three(engine):
    result = engine.generate("Hello", 4, SamplingParams(ignore_eos=True))
    assert set(result.metrics.as_dict()) == {"throughput", "input_tokens", "output_tokens"}
    assert (result.metrics.input_tokens, result.metrics.output_tokens) == (5, 4)
    assert result.metrics.throughput > 0


def test_a_seed_repeats_the_text(engine):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    first = engine.generate("Hello", params=params)
    assert engine.generate("Hello", params=params).token_ids == first.token_ids
    assert engine.generate("Hello", params=SamplingParams(temperature=1.0, seed=4, max_tokens=12)).token_ids != (
        first.token_ids
    )


def test_only_the_last_message_is_seen(engine):
    """Chapter 1 is stateless; chapter 5 brings the conversation."""
    turns = [Message(role="user", content="one"), Message(role="user", content="two")]
    assert engine.build_prompt(turns) == "<|im_start|>user:two<|im_end|><|im_start|>assistant:"


def test_prompt_logprobs_are_the_model_s_own(engine):
    result = engine.generate("abcd", 1, SamplingParams(prompt_logprobs=1, logprobs=1))
    ids = torch.tensor([engine.encode_prompt("abcd")])
    expected = engine.model(ids).logits[0].log_softmax(-1)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    for i, entry in enumerate(result.prompt_logprobs[1:]):
        assert entry is not None
        assert entry.token_id == ids[0, i + 1]
        assert entry.logprob == pytest.approx(expected[i, ids[0, i + 1]].item(), abs=1e-4)
        assert entry.top[0][0] == expected[i].argmax()
    assert result.logprobs is not None
    assert result.logprobs[0].token_id == result.token_ids[0]


def test_two_threads_are_served_one_after_the_other(engine):
    """Both right, and never two forward passes at once."""
    alone = [engine.generate(prompt, 12).token_ids for prompt in ("first", "second")]
    inside, most = 0, 0
    forward = engine.forward

    def counted(*args, **kwargs):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            return forward(*args, **kwargs)
        finally:
            inside -= 1

    engine.forward = counted
    results: dict[str, list[int]] = {}
    threads = [
        threading.Thread(target=lambda p=prompt: results.update({p: engine.generate(p, 12).token_ids}))
        for prompt in ("first", "second")
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        del engine.forward
    assert [results["first"], results["second"]] == alone
    assert most == 1


def test_a_second_stream_in_the_same_thread_is_an_error_not_a_deadlock(engine):
    stream = engine.stream("Hello", 5)
    next(stream)
    with pytest.raises(RuntimeError, match="finish or close it first"):
        engine.generate("Hello", 1)
    stream.close()
    assert engine.generate("Hello", 1, SamplingParams(ignore_eos=True)).metrics.output_tokens == 1


def test_cancel_stops_inside_a_forward_pass(engine):
    """A pass over a long prompt takes seconds: the flag must be looked at between layers, not only between tokens."""
    cancel, layers = threading.Event(), 0

    def count(module, args):
        nonlocal layers
        layers += 1
        cancel.set()

    handle = engine.model.model.layers[0].register_forward_pre_hook(count)
    last = engine.model.lm_head.register_forward_pre_hook(lambda module, args: pytest.fail("the pass went on"))
    try:
        deltas = list(engine.stream("Hello", 50, SamplingParams(ignore_eos=True), cancel))
    finally:
        handle.remove()
        last.remove()
    assert deltas == []
    assert layers == 1
    assert engine.generate("Hello", 3, SamplingParams(ignore_eos=True)).metrics.output_tokens == 3


def test_end_of_sequence_tokens_are_those_of_tokenizer_and_generation_config(tmp_path, tiny_checkpoint):
    """A chat model often ends with another token than the tokenizer's own."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert BaselineEngine(EngineConfig(model=str(folder))).tokenizer.eos_token_ids == {7, 8, IM_END}


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "martian"}'), "martian"),
        (lambda folder: (folder / "model.safetensors").unlink(), "can't load"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"half"), "can't load"),
        (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "tokenizer"),
    ],
)
def test_a_broken_checkpoint_is_one_line(tmp_path, tiny_checkpoint, spoil, error: str):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    spoil(folder)
    with pytest.raises(SetupError, match=error) as caught:
        BaselineEngine(EngineConfig(model=str(folder)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["nowhere", "./nowhere", "/no/where", "a/b/c", "someone/nothing"])
def test_a_model_that_is_not_there_is_one_line_with_the_mend(model: str):
    with pytest.raises(SetupError, match=f"MODEL={model}"):
        BaselineEngine(EngineConfig(model=model))


def test_the_peer_of_the_benchmark_gives_the_same_tokens(engine, tiny_checkpoint, monkeypatch):
    """Padded on the wrong side, or without its mask, it would be measured at other work than ours."""
    monkeypatch.setenv("MODEL", str(tiny_checkpoint))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    peer = TransformersPeer()
    results, expected = peer.generate_batch(PROMPTS, params), engine.generate_batch(PROMPTS, params)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert all(result.metrics.ttft_ms for result in results)
    with pytest.raises(UnsupportedParameterError, match="greedy"):
        peer.generate_batch(PROMPTS, SamplingParams(temperature=1.0))
