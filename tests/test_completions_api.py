"""POST /v1/completions over real HTTP: prompts in all forms, echo, log-probabilities."""

import json
import math

import openai
import pytest
import requests

from tests.tiny import VOCAB_SIZE


def post(url: str, prompt: object, **fields: object) -> requests.Response:
    return requests.post(url + "/v1/completions", json={"prompt": prompt} | fields, timeout=20)


def stream(url: str, prompt: object, **fields: object) -> list[dict]:
    response = post(url, prompt, stream=True, **fields)
    *events, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def joined(chunks: list[dict], index: int) -> dict:
    """The choice that the chunks of a stream add up to."""
    mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    logprobs: dict[str, list] | None = None
    for choice in mine:
        for key, values in (choice["logprobs"] or {}).items():
            logprobs = logprobs or {}
            logprobs.setdefault(key, []).extend(values)
    text = "".join(choice["text"] for choice in mine)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": mine[-1]["finish_reason"]}


def test_a_whole_response(scripted):
    engine, url = scripted
    engine.script = b"abc"
    body = post(url, "xy").json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert set(body["metrics"]) == {"throughput", "input_tokens", "output_tokens"}


def test_the_default_limit_is_16_tokens(scripted):
    engine, url = scripted
    engine.script = b"x" * 50
    assert post(url, "p").json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["AB", ["AB"], [65, 66], [[65, 66]]])
def test_a_prompt_may_be_text_or_token_ids(scripted, prompt: object):
    engine, url = scripted
    assert post(url, prompt).status_code == 200
    assert engine.prompts == [[65, 66]]


def test_several_prompts_and_choices_are_counted_through(scripted):
    """index = prompt index * n + k, in whole and streamed answers."""
    engine, url = scripted
    engine.script = b"ab"
    body = post(url, ["x", "yy", "zzz"], n=2, seed=4, echo=True).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "xab"),
        (1, "xab"),
        (2, "yyab"),
        (3, "yyab"),
        (4, "zzzab"),
        (5, "zzzab"),
    ]
    assert engine.seeds == [4, 5] * 3
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 18, "total_tokens": 24}
    chunks = stream(url, ["x", "yy", "zzz"], n=2, echo=True, stream_options={"include_usage": True})
    assert [joined(chunks, i) for i in range(6)] == body["choices"]
    assert chunks[-1]["usage"] == body["usage"]


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]]])
def test_an_empty_prompt_is_400(scripted, prompt: object):
    engine, url = scripted
    response = post(url, prompt)
    assert response.status_code == 400
    assert "empty" in response.json()["error"]["message"]
    assert engine.steps == 0


@pytest.mark.parametrize(("prompt", "token"), [([VOCAB_SIZE], "258"), ([65, -1], "-1"), ([[65], [9999]], "9999")])
def test_a_token_out_of_the_vocabulary_is_400(scripted, prompt: object, token: str):
    """An embedding looked up out of range ends the engine, not the request."""
    response = post(scripted[1], prompt)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, None, "prompt")
    assert token in error["message"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"suffix": "x"}, 400, "suffix"),
        ({"best_of": 2}, 400, "best_of"),
        ({"logit_bias": {"1": 2}}, 400, "logit_bias"),
        ({"max_tokens": 0}, 422, "max_tokens"),
        ({"logprobs": 6}, 422, "logprobs"),
        ({"max_tokens": -1}, 422, "max_tokens"),
        ({"best_of": 0}, 422, "best_of"),
        ({"prompt": ["a", 1]}, 422, "prompt"),
        ({"prompt": [True, False]}, 422, "prompt"),
        ({"prompt": ["a", [1]]}, 422, "prompt"),
        ({"prompt": None}, 422, "prompt"),
        ({"prompt": {"a": 1}}, 422, "prompt"),
    ],
)
def test_what_is_refused(scripted, fields: dict, status: int, param: str):
    response = post(scripted[1], **({"prompt": "p"} | fields))
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "fields", [{"suffix": None}, {"suffix": ""}, {"best_of": 1}, {"user": "u"}, {"logprobs": False}]
)
def test_what_is_accepted(scripted, fields: dict):
    response = post(scripted[1], "p", **fields)
    assert response.status_code == 200
    assert response.json()["choices"][0]["logprobs"] is None


def test_more_prompts_than_the_queue_holds_is_400(scripted):
    """They could never all be admitted: 429 would make the client try for ever."""
    response = post(scripted[1], ["a"] * 300)
    assert response.status_code == 400
    assert "at most 256 prompts" in response.json()["error"]["message"]


def test_logprobs_of_the_output(scripted):
    engine, url = scripted
    engine.script = b"ab"
    lists = post(url, "xy", logprobs=2).json()["choices"][0]["logprobs"]
    assert lists["tokens"] == ["a", "b", "<|im_end|>"]
    assert lists["text_offset"] == [0, 1, 2]
    likely = 10 - math.log(math.exp(10) + VOCAB_SIZE - 1)
    assert lists["token_logprobs"] == pytest.approx([likely] * 3, abs=1e-4)
    assert all(len(top) == 2 for top in lists["top_logprobs"])
    assert [top[token] for top, token in zip(lists["top_logprobs"], lists["tokens"], strict=True)] == (
        lists["token_logprobs"]
    )


def test_echo_with_logprobs_begins_with_the_prompt_s(scripted):
    """lm-eval scores a continuation with max_tokens 1 and cuts off the last entry: each list must be one longer."""
    engine, url = scripted
    engine.script = b"c"
    body = post(url, "ab", logprobs=1, echo=True, max_tokens=1).json()
    choice = body["choices"][0]
    assert choice["text"] == "abc"
    lists = choice["logprobs"]
    assert {len(values) for values in lists.values()} == {3}
    assert lists["tokens"] == ["a", "b", "c"]
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert lists["token_logprobs"][1] == pytest.approx(-math.log(VOCAB_SIZE), abs=1e-4)  # the script's prompt is flat
    assert lists["text_offset"] == [0, 1, 2]
    assert lists["top_logprobs"][1]["b"] == lists["token_logprobs"][1]
    assert max(lists["top_logprobs"][2].values()) == lists["token_logprobs"][2]  # it was the greedy choice
    chunks = stream(url, "ab", logprobs=1, echo=True, max_tokens=1)
    assert joined(chunks, 0) == choice


def test_echo_without_output_only_scores(scripted):
    engine, url = scripted
    choice = post(url, "ab", logprobs=0, echo=True, max_tokens=0).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert engine.steps == 0
    assert joined(stream(url, "ab", logprobs=0, echo=True, max_tokens=0), 0) == choice


def test_parts_of_a_character_do_not_collide(scripted):
    """Decoded alone, both halves read U+FFFD, and one key would hide the other."""
    engine, url = scripted
    engine.script = "é".encode()
    choice = post(url, "a", logprobs=5).json()["choices"][0]
    assert choice["text"] == "é"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
    assert all(len(top) == 5 for top in choice["logprobs"]["top_logprobs"])
    chunks = stream(url, "a", logprobs=5)
    assert joined(chunks, 0) == choice


def test_two_tokens_that_read_the_same_are_told_apart(scripted, monkeypatch):
    """A dictionary keyed by text loses the chosen token's entry to its twin."""
    engine, url = scripted
    engine.script = b"a"
    monkeypatch.setattr(engine.tokenizer, "token_bytes", lambda token_id: b"same")
    lists = post(url, "p", logprobs=3).json()["choices"][0]["logprobs"]
    assert [len(top) for top in lists["top_logprobs"]] == [3, 3]
    assert lists["top_logprobs"][0]["same"] == lists["token_logprobs"][0]


def test_the_openai_client(scripted):
    engine, url = scripted
    engine.script = b"abc"
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    assert client.completions.create(model="default", prompt="x").choices[0].text == "abc"
    chunks = client.completions.create(model="default", prompt=[1, 2], stream=True, max_tokens=2)
    assert [chunk.choices[0].text for chunk in chunks] == ["a", "b", ""]


def test_prompt_over_the_context(scripted):
    engine, url = scripted
    engine.max_model_len = 4
    assert post(url, "abcd").json()["error"]["code"] == "context_length_exceeded"
    assert post(url, "abcd", echo=True, max_tokens=0).status_code == 200
    assert post(url, "abc").json()["choices"][0]["logprobs"] is None
