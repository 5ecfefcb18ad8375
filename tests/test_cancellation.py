"""Clients that go away, engines that fail, servers that stop: for a blocking engine and for an online one."""

import gc
import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import anyio
import openai
import pytest
import requests
from starlette.testclient import TestClient

from shared.server import make_app
from tests.serving import samples, serve, wait_until
from tests.tiny import FakeOnlineEngine, ScriptedEngine

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(params=["blocking", "online"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[ScriptedEngine, str]]:
    """A new engine of each kind, whose tokens wait for the gate, behind real HTTP."""
    engine = ScriptedEngine() if request.param == "blocking" else FakeOnlineEngine(max_running=1)
    engine.script = b"abcdefgh"
    engine.gate = threading.Semaphore(0)
    with serve(make_app(engine)) as url:
        yield engine, url
        if engine.gate is not None:
            engine.gate.release(10_000)


@pytest.fixture
def online() -> Iterator[tuple[FakeOnlineEngine, str]]:
    engine = FakeOnlineEngine(b"abcdefgh")
    with serve(make_app(engine)) as url:
        yield engine, url


def gauges(url: str) -> tuple[float, float]:
    """(running, waiting)"""
    values = samples(url)
    return values["engine_requests_running"], values["engine_requests_waiting"]


def send(url: str, path: str = CHAT, **fields: object) -> socket.socket:
    """Send a request and return the open connection, so that the test decides when the client goes away."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(HELLO | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 3])
def test_a_client_that_goes_away_frees_the_engine_within_a_second(served, stream: bool, tokens_before: int, caplog):
    """In prefill and in decode. A plain handler isn't cancelled by the framework: the engine would go on for nobody."""
    engine, url = served
    connection = send(url, stream=stream, max_tokens=8)
    wait_until(lambda: gauges(url) == (1, 0))
    if tokens_before:
        engine.gate.release(tokens_before)
    if stream and tokens_before:
        received = b""
        while b'"content":"c"' not in received:
            received += connection.recv(4096)
    connection.close()
    wait_until(lambda: gauges(url) == (0, 0), seconds=1)
    wait_until(lambda: samples(url)["engine_requests_total{aborted}"] == 1, seconds=1)
    gc.collect()  # asyncio logs a task's lost exception when the task is collected
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "a traceback for each client"
    engine.gate.release(100)
    assert requests.post(url + CHAT, json=HELLO, timeout=5).json()["choices"][0]["message"]["content"] == "abcdefgh"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_while_queued_is_never_run(served, stream: bool):
    engine, url = served
    running = send(url)
    wait_until(lambda: gauges(url) == (1, 0))
    queued = send(url, stream=stream, seed=99)
    wait_until(lambda: gauges(url) == (1, 1))
    queued.close()
    wait_until(lambda: gauges(url) == (1, 0), seconds=1)
    engine.gate.release(100)
    assert running.recv(20).startswith(b"HTTP/1.1 200")
    running.close()
    assert 99 not in engine.seeds


@pytest.mark.parametrize("stream", [False, True])
def test_one_of_several_prompts_goes_away_with_the_others(served, stream: bool):
    _, url = served
    connection = send(url, "/v1/completions", prompt=["a", "b"], stream=stream)
    wait_until(lambda: gauges(url) == (1, 1))
    connection.close()
    wait_until(lambda: gauges(url) == (0, 0), seconds=1)


@pytest.mark.parametrize("kind", [ScriptedEngine, FakeOnlineEngine])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_request_that_is_cancelled_again_and_again_ends_cleanly(kind, prompt, caplog):
    """anyio repeats a cancellation until it gets through: a clean-up that waits is cancelled too, half done."""
    engine = kind(b"abcdefgh")
    app = make_app(engine)
    body = json.dumps({"prompt": prompt, "stream": True, "max_tokens": 8}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def run() -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        engine.gate = threading.Semaphore(2)

        async def receive() -> dict:
            return messages.pop() if messages else await anyio.sleep_forever()

        async with app.router.lifespan_context(app):
            with anyio.CancelScope() as cancelling:

                async def send(message: dict) -> None:
                    if b"data:" in message.get("body", b""):
                        cancelling.cancel()

                await app(scope, receive, send)
            assert cancelling.cancelled_caught
            engine.gate.release(100)

    anyio.run(run)
    gc.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_blocking_engine_serves_one_after_the_other():
    """Two requests at once: both right, in the order in which they came, never mixed."""
    engine = ScriptedEngine(b"abcdefgh")
    with serve(make_app(engine)) as url, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: requests.post(url + CHAT, json=HELLO, timeout=10).json(), range(8)))
    assert {answer["choices"][0]["message"]["content"] for answer in answers} == {"abcdefgh"}
    assert engine.most_at_once == 1


def test_an_online_engine_serves_them_at_once(online):
    engine, url = online
    engine.gate = threading.Semaphore(0)
    connections = [send(url, stream=True) for _ in range(4)]
    wait_until(lambda: gauges(url) == (4, 0))
    engine.gate.release(1000)
    for connection in connections:
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(4096)
        assert data.count(b'"content":') == 9
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_before_the_stream_starts(served, stream: bool):
    engine, url = served
    engine.max_waiting = 2
    open_ones = []
    for expected in ((1, 0), (1, 1), (1, 2)):
        open_ones.append(send(url))
        wait_until(lambda expected=expected: gauges(url) == expected)
    response = requests.post(url + CHAT, json=HELLO | {"stream": stream}, timeout=5)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert samples(url)["engine_requests_total{rejected}"] == 1
    for connection in open_ones:
        connection.close()
    wait_until(lambda: gauges(url) == (0, 0))


def test_prompts_are_admitted_all_or_none(served):
    """Half a request in the queue would be computed for nobody."""
    engine, url = served
    engine.max_waiting = 2
    connection = send(url)
    wait_until(lambda: gauges(url) == (1, 0))
    response = requests.post(url + "/v1/completions", json={"prompt": ["a"], "n": 3}, timeout=5)
    assert response.status_code == 400  # more choices than the queue can ever hold
    second = send(url)
    wait_until(lambda: gauges(url) == (1, 1))
    response = requests.post(url + "/v1/completions", json={"prompt": ["a", "b"]}, timeout=5)
    assert response.status_code == 429
    assert gauges(url) == (1, 1)
    connection.close()
    second.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_a_500(served, stream: bool):
    engine, url = served
    engine.gate, engine.fail_at = None, 0
    response = requests.post(url + CHAT, json=HELLO | {"stream": stream}, timeout=5)
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "server_error"
    assert "secret" not in response.text
    engine.fail_at = None
    assert requests.post(url + CHAT, json=HELLO, timeout=5).status_code == 200
    assert samples(url)["engine_requests_total{error}"] == 1


def test_a_failure_after_the_first_token_is_the_last_event(served):
    """No finish chunk and no [DONE]: the client must not take half an answer for a whole one."""
    engine, url = served
    engine.gate, engine.fail_at = None, 2
    response = requests.post(url + CHAT, json=HELLO | {"stream": True}, timeout=5)
    *events, rest = response.content.split(b"\n\n")
    assert rest == b""
    assert len(events) == 4  # role, a, b, error
    error = json.loads(events[-1].removeprefix(b"data: "))
    assert error["error"]["code"] == "server_error"
    assert b'"finish_reason":"' not in response.content
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="failed"):
        list(client.chat.completions.create(model="default", messages=HELLO["messages"], stream=True))


def test_a_dead_engine_ends_every_request_and_is_seen_by_health(online):
    """A client of a dead loop that isn't told waits for ever."""
    engine, url = online
    engine.gate = threading.Semaphore(0)
    streaming, whole = send(url, stream=True), send(url)
    wait_until(lambda: gauges(url) == (2, 0))
    engine.gate.release(2)
    received = b""
    while b'"content":"a"' not in received:
        received += streaming.recv(4096)
    engine.die()
    while chunk := streaming.recv(4096):
        received += chunk
        if b'"server_error"' in received:
            break
    assert b"[DONE]" not in received
    assert b" 503 " in whole.recv(4096).split(b"\r\n")[0]
    for response in (requests.get(url + "/health", timeout=5), requests.post(url + CHAT, json=HELLO, timeout=5)):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "server_error"
    streaming.close()
    whole.close()


def test_a_server_whose_engine_has_not_started_says_503():
    """Without a lifespan the engine's thread isn't there: a request must not wait for it."""
    client = TestClient(make_app(ScriptedEngine("ab")))  # not entered: the lifespan hasn't begun
    assert client.get("/health").status_code == 503
    assert client.post(CHAT, json=HELLO).status_code == 503
    with client:
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("kind", [ScriptedEngine, FakeOnlineEngine])
def test_a_server_that_stops_ends_its_streams(kind):
    """Ctrl-C with a stream open: `serve` fails if the server isn't gone in time."""
    engine = kind(b"abcdefgh")
    engine.gate = threading.Semaphore(1)
    with serve(make_app(engine)) as url:
        connection = send(url, stream=True)
        received = b""
        while b'"content":"a"' not in received:
            received += connection.recv(4096)
    while chunk := connection.recv(4096):
        received += chunk
    assert b"[DONE]" not in received


def test_a_silent_stream_gets_comments(online, monkeypatch):
    """Proxies close a connection on which nothing comes."""
    engine, url = online
    monkeypatch.setattr("shared.asgi.PING_SECONDS", 0.05)
    engine.gate = threading.Semaphore(1)
    response = requests.post(url + CHAT, json=HELLO | {"stream": True}, stream=True, timeout=10)
    lines = response.iter_lines()
    while next(lines) != b": ping":
        pass
    engine.gate.release(100)
    rest = list(lines)
    assert b"data: [DONE]" in rest
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    chunks = list(client.chat.completions.create(model="default", messages=HELLO["messages"], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abcdefgh"


def test_an_online_engine_s_own_numbers_are_in_the_metrics(online):
    values = samples(online[1])
    assert (values["engine_kv_blocks_used"], values["engine_kv_blocks_total"]) == (3, 8)
    assert values["engine_preemptions_total"] == 0


def test_choices_of_an_online_engine_come_mixed(online):
    body = requests.post(online[1] + CHAT, json=HELLO | {"n": 3}, timeout=5).json()
    assert [c["message"]["content"] for c in body["choices"]] == ["abcdefgh"] * 3
    response = requests.post(online[1] + CHAT, json=HELLO | {"n": 2, "stream": True}, timeout=5)
    order = [json.loads(e[6:])["choices"][0]["index"] for e in response.content.split(b"\n\n")[:-2]]
    assert order[:4] == [0, 0, 1, 1]  # role and "a" of each
    assert order[4:6] == [0, 1]
