"""Chapter servers as a reader starts them: `uvicorn 05_server:app` in a process, the real model, real clients."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import requests

from shared.trace import read_trace
from tests.serving import ROOT, free_port, samples, serve_chapter, wait_until

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def url(real_model):
    with serve_chapter("ch01_baseline") as (url, _):
        yield url


def test_the_curl_of_the_book(url):
    body = {"messages": HELLO, "max_tokens": 50}
    answer = requests.post(url + "/v1/chat/completions", json=body, timeout=120).json()
    assert answer["choices"][0]["message"]["content"] == "Hello! How can I assist you today?"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert set(answer["metrics"]) == {"throughput", "input_tokens", "output_tokens"}


def test_the_openai_client_streams(url):
    """Token by token, and the same text as in one piece."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="default", messages=HELLO, max_tokens=6, stream=True)
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content]
    assert pieces == ["Hello", "!", " How", " can", " I", " assist"]


def test_two_requests_at_once_are_both_right(url):
    def ask(question: str) -> str:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(model="default", messages=messages, max_tokens=5)  # type: ignore[arg-type]
        return answer.choices[0].message.content or ""

    questions = ["Hello", "What is the capital of France?"]
    alone = [ask(question) for question in questions]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, questions)) == alone
    assert alone[0] != alone[1]


def test_a_client_that_goes_away_frees_the_real_engine_within_a_second(url):
    """In the middle of a forward pass that takes many seconds."""
    long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(requests.ReadTimeout):
        requests.post(url + "/v1/chat/completions", json={"messages": long}, timeout=1.5)
    wait_until(lambda: "engine_requests_running 0.0" in requests.get(url + "/metrics", timeout=5).text, seconds=1.5)


ONLINE = [
    chapter for chapter in sorted(path.parent.name for path in ROOT.glob("ch*/05_server.py")) if chapter >= "ch09"
]


@pytest.mark.parametrize("chapter", ONLINE)
def test_32_streams_at_once_get_what_each_gets_alone(chapter: str, real_model, tmp_path):
    """More than run at once, of different lengths, over one async client; then all of it is gone again."""
    questions = [f"Count from {i} to {i + 5}." + " Please." * (i % 7) for i in range(32)]

    async def ask(client: openai.AsyncOpenAI, question: str) -> tuple[str, int]:
        stream = await client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, tokens = "", 0
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, tokens

    async def all_at_once(url: str) -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(ask(client, question) for question in questions))

    trace = tmp_path / "trace.jsonl"
    with serve_chapter(chapter, TRACE=str(trace), MAX_MODEL_LEN="512") as (url, _):
        answers = asyncio.run(all_at_once(url))
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        for question, (text, tokens) in list(zip(questions, answers, strict=True))[::8]:
            alone = client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": question}], max_tokens=12
            )
            assert (alone.choices[0].message.content, alone.usage.completion_tokens) == (text, tokens)
        values = samples(url)
        assert (values["engine_requests_running"], values["engine_requests_waiting"]) == (0, 0)
        assert values["engine_requests_total{length}"] + values["engine_requests_total{stop}"] == 36
        assert values["engine_step_seconds_count"] > 12
    steps = read_trace(trace)
    assert max(step["running"] for step in steps) > 8
    assert max(len(step["scheduled"]) for step in steps) == 16
    assert sum(len(step["ended"]) for step in steps) == 36


def test_a_bad_setting_stops_the_start_with_one_line(real_model):
    """No traceback of forty lines for a typing error."""
    command = [sys.executable, "-m", "uvicorn", "05_server:app", "--port", str(free_port())]
    environment = os.environ | {"MAX_MODEL_LEN": "many"}
    run = subprocess.run(
        command, cwd=ROOT / "ch01_baseline", env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1
    [line] = run.stderr.strip().splitlines()
    assert line.startswith("MAX_MODEL_LEN=many")


@pytest.mark.parametrize("chapter", ["ch05_kv_cache", *ONLINE])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_stopped_ends_its_streams_with_an_error(number: signal.Signals, chapter: str, real_model):
    """uvicorn waits for open streams for ever, and its own cancellation ends them without a word and in a traceback."""
    with serve_chapter(chapter) as (url, process):
        body = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 4000}
        response = requests.post(url + "/v1/chat/completions", json=body, stream=True, timeout=30)
        lines = response.iter_lines()
        next(lines)
        began = time.monotonic()
        process.send_signal(number)
        *_, last = [line for line in lines if line]
        process.wait(15)
        assert time.monotonic() - began < 8
        assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "the server is stopping"
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("chapter", sorted(path.parent.name for path in ROOT.glob("ch*/05_server.py")))
def test_a_chapter_serves_another_checkpoint(chapter: str, tiny_checkpoint):
    with serve_chapter(chapter, MODEL=str(tiny_checkpoint), MAX_MODEL_LEN="64") as (url, _):
        [model] = requests.get(url + "/v1/models", timeout=5).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 64)
        body = {"messages": HELLO, "max_tokens": 5, "ignore_eos": True}
        answer = requests.post(url + "/v1/chat/completions", json=body, timeout=20).json()
        assert answer["usage"]["completion_tokens"] == 5
