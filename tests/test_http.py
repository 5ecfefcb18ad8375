"""Around the endpoints: errors on every path, request ids, CORS, the key, models, health, metrics, hostile input."""

import json
import socket

import openai
import pytest
import requests

from shared.server import make_app
from tests.serving import samples, serve
from tests.tiny import ScriptedEngine

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def error_of(response: requests.Response) -> dict:
    """The error, after checking that it has the one shape."""
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/health", 405),
    ],
)
def test_every_path_answers_with_the_same_shape_of_error(scripted, method: str, path: str, status: int):
    response = requests.request(method, scripted[1] + path, timeout=5)
    assert response.status_code == status
    assert error_of(response)["code"] is None
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe\x00",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "x"}], "top_p": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "stop": ["\\udfff"]}',
        b'{"messages": [{"role": "user", "content": "x"}], "metadata": {"\\ud800": 1}}',
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"\\ud800": "x"}}',
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "n": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_what_is_no_good_json_is_422(scripted, path: str, body: bytes):
    """Plain FastAPI echoes the input into the error, and dies of it: NaN, lone surrogates and bytes aren't JSON."""
    response = requests.post(scripted[1] + path, data=body, headers={"Content-Type": "application/json"}, timeout=20)
    assert response.status_code == 422
    assert error_of(response)["type"] == "invalid_request_error"
    if response.json()["detail"][0]["type"] == "json_invalid":
        assert "isn't valid JSON: " in error_of(response)["message"]
        assert error_of(response)["param"] == "body"
    assert all(set(entry) == {"type", "loc", "msg"} for entry in response.json()["detail"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1.5] * 100_000}),
        (CHAT, {"messages": [1] * 100_000}),
        (CHAT, HELLO | {"messages": [{"role": "user", "content": [1, 1]}] * 10_000}),
        (CHAT, HELLO | {"stop": [1] * 100_000}),
        (CHAT, HELLO | {"stop": [str(i) for i in range(100)]}),
    ],
)
def test_many_errors_in_one_request_are_not_all_told(scripted, path: str, body: dict):
    """An error for each item blocks the server for seconds and answers with more megabytes than were sent."""
    response = requests.post(scripted[1] + path, json=body, timeout=10)
    assert response.status_code == 422
    assert len(response.content) < 10_000


def test_a_body_that_is_too_large_is_413(scripted):
    """Else one client could fill the memory. What fits is still read whole."""
    response = requests.post(scripted[1] + "/v1/completions", json={"prompt": "x" * 9 * 2**20}, timeout=10)
    assert response.status_code == 413
    assert "at most 8 MB" in error_of(response)["message"]
    response = requests.post(scripted[1] + "/v1/completions", json={"prompt": "x", "user": "y" * 2**22}, timeout=10)
    assert response.status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_prompt_far_too_long_is_refused_without_encoding_it(scripted, monkeypatch, path: str):
    """Encoding megabytes takes seconds, in which nobody else's prompt is encoded."""
    engine, url = scripted
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *args, **kwargs: pytest.fail("it was encoded"))
    text = "a b" * 2**20
    response = requests.post(
        url + path, json={"prompt": text, "messages": [{"role": "user", "content": text}]}, timeout=10
    )
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


def test_a_forgotten_content_type_is_named(scripted):
    """curl -d without -H sends a form; "not a dictionary" wouldn't tell the reader what to mend."""
    response = requests.post(scripted[1] + CHAT, data=json.dumps(HELLO), timeout=5)
    assert response.status_code == 422
    assert "Content-Type: application/json" in error_of(response)["message"]


def test_a_content_type_with_charset_is_fine(scripted):
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert requests.post(scripted[1] + CHAT, data=json.dumps(HELLO), headers=headers, timeout=5).status_code == 200


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-123", True), ("chatcmpl-a.b:c/d", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)],
)
def test_request_ids_are_echoed_if_sane(scripted, given: str, echoed: bool):
    response = requests.get(scripted[1] + "/health", headers={"x-request-id": given}, timeout=5)
    assert (response.headers["x-request-id"] == given) == echoed
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("streamed", [False, True])
def test_every_kind_of_response_has_a_request_id_and_cors(scripted, streamed: bool):
    """Errors too: a browser can't read a response without these headers, and shows a network error instead."""
    url, headers = scripted[1], {"Origin": "http://example.org"}
    for fields in (HELLO, {"messages": []}, HELLO | {"model": "x"}, HELLO | {"max_tokens": 9999}):
        response = requests.post(url + CHAT, json=fields | {"stream": streamed}, headers=headers, timeout=10)
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers
        assert response.headers["x-request-id"]


def test_a_preflight_allows_what_the_openai_client_sends(scripted):
    asked = "authorization,content-type,x-stainless-arch,x-stainless-retry-count,x-request-id"
    response = requests.options(
        scripted[1] + CHAT,
        headers={
            "Origin": "http://example.org",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": asked,
        },
        timeout=5,
    )
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    allowed = response.headers["access-control-allow-headers"].replace(" ", "").lower().split(",")
    assert set(asked.split(",")) <= set(allowed)
    assert response.headers["x-request-id"]


def test_an_unexpected_failure_is_a_500_that_tells_nothing_and_can_be_read(scripted, monkeypatch):
    """Starlette's own answer is plain text, without CORS and without an id."""
    engine, url = scripted
    monkeypatch.setattr(engine, "build_prompt", lambda messages: 1 / 0)
    response = requests.post(url + CHAT, json=HELLO, headers={"Origin": "http://example.org"}, timeout=5)
    assert response.status_code == 500
    assert error_of(response)["code"] == "server_error"
    assert "division" not in response.text
    assert response.headers["access-control-allow-origin"] == "*"
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-request-id"]


# --- the key ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_KEY", "sesame")
        app = make_app(ScriptedEngine("ab"))
    with serve(app) as url:
        yield url


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic sesame", "sesame", "Bearer", "Bearer sésame"])
def test_a_wrong_key_is_401(locked, header: str | None):
    headers = {} if header is None else {"Authorization": header.encode()}
    response = requests.post(locked + CHAT, json=HELLO, headers=headers, timeout=5)
    assert response.status_code == 401
    assert error_of(response)["code"] == "invalid_api_key"
    assert requests.get(locked + "/metrics", headers=headers, timeout=5).status_code == 401


def test_the_right_key_passes_and_health_and_preflights_need_none(locked):
    client = openai.OpenAI(base_url=locked + "/v1", api_key="sesame", max_retries=0)
    assert client.models.list().data[0].id == "scripted"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=locked + "/v1", api_key="x", max_retries=0).models.list()
    assert requests.get(locked + "/health", timeout=5).status_code == 200
    preflight = {"Origin": "http://example.org", "Access-Control-Request-Method": "POST"}
    assert requests.options(locked + CHAT, headers=preflight, timeout=5).status_code == 200


# --- models, health, metrics ------------------------------------------------------------------------------------------


def test_models(scripted, monkeypatch):
    engine, url = scripted
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("scripted", "model", "local")
    assert model.model_dump()["max_model_len"] == 1000
    assert client.models.retrieve("scripted") == model
    monkeypatch.setattr(engine, "model_id", "owner/name")  # hub ids hold a slash
    assert requests.get(url + "/v1/models/owner/name", timeout=5).json()["id"] == "owner/name"
    response = requests.get(url + "/v1/models/scripted", timeout=5)
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("streamed", [False, True])
def test_another_model_is_404(scripted, path: str, streamed: bool):
    body = HELLO | {"prompt": "p", "model": "gpt-5", "stream": streamed}
    response = requests.post(scripted[1] + path, json=body, timeout=5)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "scripted" in error["message"]


def test_health(scripted):
    response = requests.get(scripted[1] + "/health", timeout=5)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    head = requests.head(scripted[1] + "/health", timeout=5)
    assert (head.status_code, head.content) == (200, b"")


def test_metrics_count_what_happened(scripted):
    engine, url = scripted
    engine.script = b"abc"
    before = samples(url)
    requests.post(url + CHAT, json=HELLO | {"n": 2}, timeout=5)
    requests.post(url + "/v1/completions", json={"prompt": "xy", "max_tokens": 2}, timeout=5)
    requests.post(url + "/v1/completions", json={"prompt": ""}, timeout=5)
    after = samples(url)
    change = {name: value - before[name] for name, value in after.items() if value != before[name]}
    assert change["engine_requests_total{stop}"] == 2
    assert change["engine_requests_total{length}"] == 1
    assert change["engine_requests_total{rejected}"] == 1
    assert change["engine_prompt_tokens_total"] == 23 + 2
    assert change["engine_generation_tokens_total"] == 4 + 4 + 2
    for name, count in (("ttft", 3), ("tpot", 3), ("e2e", 3), ("step", 10)):
        assert change[f"engine_{name}_seconds_count"] == count
        assert change[f"engine_{name}_seconds_sum"] > 0
    assert (after["engine_requests_running"], after["engine_requests_waiting"]) == (0, 0)
    assert "engine_kv_blocks_total" not in after  # this engine has no blocks


# --- hostile connections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"garbage\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        b"Content-Type: application/json\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ],
)
def test_a_client_that_breaks_off_does_no_harm(scripted, sent: bytes):
    """Half a request and gone: the server must go on and have nothing left running."""
    engine, url = scripted
    engine.script = b"ab"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(sent)
    assert requests.post(url + CHAT, json=HELLO, timeout=5).status_code == 200
    assert samples(url)["engine_requests_running"] == 0
