"""POST /v1/chat/completions over real HTTP: each field, streamed and not, on a model that says its script."""

import json
import math

import openai
import pytest
import requests

from shared.engine import RequestMetrics

HELLO = [{"role": "user", "content": "Hello"}]


def post(url: str, **fields: object) -> requests.Response:
    return requests.post(url + "/v1/chat/completions", json={"messages": HELLO} | fields, timeout=20)


def frames(response: requests.Response) -> list[dict]:
    """The chunks of a stream, after checking the form of each frame to the byte."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].split(";")[0] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    *events, rest = response.content.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event for event in events)
    assert events[-1] == b"data: [DONE]"
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]


def stream(url: str, **fields: object) -> list[dict]:
    return frames(post(url, stream=True, **fields))


def streamed_text(chunks: list[dict], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_a_whole_response(scripted):
    engine, url = scripted
    engine.script = b"Hi there"
    body = post(url).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "scripted"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt_tokens = len(b"user:Hello") + len(b"assistant:") + 3
    assert body["usage"] == {"prompt_tokens": prompt_tokens, "completion_tokens": 9, "total_tokens": prompt_tokens + 9}
    assert set(body["metrics"]) == {"throughput", "input_tokens", "output_tokens"}
    assert set(body) == {"id", "object", "created", "model", "choices", "usage", "metrics"}


def test_the_template_writes_the_special_tokens_once(scripted):
    """Encoding a template's text with special tokens again gives two begin-of-sequence tokens."""
    engine, url = scripted
    post(url)
    assert engine.prompts == [[256, *b"user:Hello", 257, 256, *b"assistant:"]]


def test_a_whole_stream(scripted):
    engine, url = scripted
    engine.script = "hi 😀é".encode()
    chunks = stream(url, stream_options={"include_usage": True})
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    *first, last = chunks
    assert all(chunk["usage"] is None for chunk in first)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 10
    deltas = [chunk["choices"][0]["delta"] for chunk in first]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "i"},
        {"content": " "},
        {"content": "😀"},
        {"content": "é"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in first]
    assert reasons == [None] * 6 + ["stop"]


def test_usage_is_streamed_only_if_asked_for(scripted):
    engine, url = scripted
    engine.script = b"ab"
    assert all("usage" not in chunk and chunk["choices"] for chunk in stream(url))
    assert all("usage" not in chunk for chunk in stream(url, stream_options={"include_usage": False}))
    assert post(url, stream_options={"include_usage": True}).json()["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("fields", "text", "reason", "tokens"),
    [
        ({}, "ABCDEFG 😀é", "stop", 15),
        ({"max_tokens": 3}, "ABC", "length", 3),
        ({"max_tokens": 10}, "ABCDEFG \ufffd", "length", 10),
        ({"stop": ["DEF"]}, "ABC", "stop", 6),
        ({"stop": "DEF"}, "ABC", "stop", 6),
        ({"stop": ["CX"]}, "ABCDEFG 😀é", "stop", 15),
        ({"stop": ["BCD", "ABC"]}, "", "stop", 3),
        ({"stop": []}, "ABCDEFG 😀é", "stop", 15),
        ({"stop": None}, "ABCDEFG 😀é", "stop", 15),
        ({"stop": [""]}, "ABCDEFG 😀é", "stop", 15),
        ({"ignore_eos": True, "max_tokens": 20}, "ABCDEFG 😀é", "length", 20),
        ({"stop": ["B"], "min_tokens": 5}, "ABCDEFG 😀é", "stop", 15),
        ({"max_completion_tokens": 2, "max_tokens": 9}, "AB", "length", 2),
    ],
)
def test_streamed_and_whole_answers_agree(scripted, fields, text: str, reason: str, tokens: int):
    """Text, finish_reason and usage: two code paths that drift apart."""
    engine, url = scripted
    engine.script = "ABCDEFG 😀é".encode()
    body = post(url, **fields).json()
    assert body["choices"][0]["message"]["content"] == text
    assert body["choices"][0]["finish_reason"] == reason
    assert body["usage"]["completion_tokens"] == tokens
    chunks = stream(url, stream_options={"include_usage": True}, **fields)
    assert streamed_text(chunks) == text
    assert chunks[-2]["choices"][0]["finish_reason"] == reason
    assert chunks[-1]["usage"] == body["usage"]
    assert not [c for chunk in chunks[1:] for c in chunk["choices"] if c["delta"].get("content") == ""]


def test_the_default_limit_is_100_tokens_and_what_is_left_of_the_context(scripted):
    engine, url = scripted
    engine.script = b"x" * 500
    assert post(url).json()["usage"]["completion_tokens"] == 100
    engine.max_model_len = 40  # the prompt has 23
    body = post(url).json()
    assert body["usage"]["completion_tokens"] == 17
    assert body["choices"][0]["finish_reason"] == "length"
    assert post(url, min_tokens=50).json()["usage"]["completion_tokens"] == 17


def test_choices_have_their_own_index_seed_and_finish(scripted):
    engine, url = scripted
    engine.script = b"ab"
    body = post(url, n=3, seed=5, temperature=0.5).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert engine.seeds == [5, 6, 7]
    assert body["usage"]["completion_tokens"] == 9
    assert body["metrics"]["output_tokens"] == 9
    assert body["usage"]["prompt_tokens"] == 23
    chunks = stream(url, n=3)
    for index in range(3):
        assert streamed_text(chunks, index) == "ab"
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in mine] == [None] * 3 + ["stop"]


def test_logprobs(scripted):
    """One entry a token, of the unscaled softmax: 10 against 257 zeros."""
    engine, url = scripted
    engine.script = "aé".encode()
    top = 10 - math.log(math.exp(10) + 257)
    content = post(url, logprobs=True, top_logprobs=2, temperature=0.1, seed=1).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert len(content) == 4
    assert content[0]["token"] == "a"
    assert content[0]["bytes"] == [97]
    assert content[0]["logprob"] == pytest.approx(top, abs=1e-4)
    assert len(content[0]["top_logprobs"]) == 2
    assert content[0]["top_logprobs"][0] == {key: content[0][key] for key in ("token", "logprob", "bytes")}
    assert content[1]["bytes"] + content[2]["bytes"] == list("é".encode())
    assert content[3]["token"] == "<|im_end|>"
    chunks = stream(url, logprobs=True, top_logprobs=2, temperature=0.1, seed=1)
    streamed = [e for chunk in chunks for c in chunk["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == content


def test_logprobs_without_top(scripted):
    engine, url = scripted
    engine.script = b"a"
    content = post(url, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}],
        [{"role": "system", "content": "x"}, {"role": "user", "content": "Hello"}],
    ],
)
def test_contents_in_parts_are_one_string(scripted, messages: list[dict]):
    """Templates add strings and fail on a list."""
    engine, url = scripted
    assert post(url, messages=[messages[-1]]).status_code == 200
    assert bytes(engine.prompts[0][1:11]) == b"user:Hello"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant"},
        {"role": "tool", "content": "a", "tool_call_id": "1"},
        {"role": "function", "content": "a", "name": "f"},
        {"role": "user", "content": "a", "name": "Ann", "unknown": {"deep": [1, None]}},
    ],
)
def test_every_role_is_understood(scripted, message: dict):
    assert post(scripted[1], messages=[message]).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": False, "service_tier": "auto"},
        {"response_format": {"type": "text"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"logit_bias": {}},
        {"model": "default"},
        {"model": "scripted"},
        {"modalities": ["text"]},
        {"something": {"unknown": 1}},
        dict.fromkeys(("model", "max_tokens", "temperature", "n", "seed", "stream", "logprobs", "logit_bias")),
        dict.fromkeys(("stream_options", "response_format", "tools", "tool_choice", "user", "audio", "top_p")),
        {"top_p": 0, "temperature": 2},
        {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": -2, "frequency_penalty": 2},
        {"seed": 2**70, "temperature": 1},
        {"top_logprobs": 0, "logprobs": False},
    ],
)
def test_what_is_accepted(scripted, fields: dict):
    engine, url = scripted
    engine.script = b"ab"
    response = post(url, **fields)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_can_not_be_honoured_is_refused_by_name(scripted, fields: dict, param: str, streamed: bool):
    """Accepted and ignored, it would give the client something else than it asked for."""
    response = post(scripted[1], stream=streamed, **fields)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert param in error["message"]
    if param == "response_format":
        kind = fields["response_format"]["type"]
        assert error["message"] == f"'response_format' of type '{kind}' is not supported with this model"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"seed": "x"}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
)
def test_what_is_out_of_range_is_422_with_its_place(scripted, fields: dict, param: str):
    response = post(scripted[1], **fields)
    assert response.status_code == 422
    body = response.json()
    assert body["error"]["param"] == param
    assert body["error"]["message"].startswith(param)
    assert body["error"]["code"] is None
    assert all(set(entry) == {"type", "loc", "msg"} for entry in body["detail"])
    assert body["detail"][0]["loc"][0] == "body"


@pytest.mark.parametrize(
    ("fields", "param"), [({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"top_logprobs": 2}, "top_logprobs")]
)
def test_parameters_that_contradict_each_other_are_422(scripted, fields: dict, param: str):
    """A validator that sees several fields has no place of its own to report."""
    response = post(scripted[1], **fields)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["message"].startswith(param)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_or_limit_over_the_context_is_400_in_the_words_clients_know(scripted, streamed: bool):
    """Agents shorten their prompt when they recognise this message."""
    engine, url = scripted
    engine.max_model_len = 40
    response = post(url, max_tokens=18, stream=streamed)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "This model's maximum context length is 40 tokens. However, you requested 41 tokens (23 in the "
        "messages, 18 in the completion): prompt is too long or max_tokens too large (context_length_exceeded).",
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }
    assert post(url, max_tokens=17).status_code == 200
    engine.max_model_len = 23
    assert post(url, stream=streamed).json()["error"]["code"] == "context_length_exceeded"
    assert engine.steps == 1  # of the one request that fitted


def test_the_openai_client(scripted):
    """What a reader will do first."""
    engine, url = scripted
    engine.script = "Hällo 😀".encode()
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model="default", messages=HELLO)
    assert answer.choices[0].message.content == "Hällo 😀"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    chunks = list(
        client.chat.completions.create(
            model="scripted", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hällo 😀"
    assert chunks[-1].usage == answer.usage
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert missing.value.code == "model_not_found"
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(model="default", messages=HELLO, max_tokens=5000)
    with pytest.raises(openai.UnprocessableEntityError):
        client.chat.completions.create(model="default", messages=HELLO, temperature=9)


def test_engine_metrics_reach_the_response_without_a_change_of_the_server(scripted, monkeypatch):
    """Later chapters add ttft_ms and tpot_ms, and cached tokens to the usage."""
    engine, url = scripted
    engine.script = b"ab"
    metrics = RequestMetrics(1, 2, 3.0, ttft_ms=4.0, tpot_ms=5.0, cached_tokens=16)
    monkeypatch.setattr("shared.sequence.Sequence.metrics", lambda self: metrics)
    body = post(url).json()
    assert body["metrics"] == metrics.as_dict()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    last = stream(url, stream_options={"include_usage": True})[-1]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_ids_are_unique(scripted):
    assert post(scripted[1]).json()["id"] != post(scripted[1]).json()["id"]
