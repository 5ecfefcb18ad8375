"""HTTP around the routes: errors as the OpenAI API writes them, request ids, the key, streams, clients that go away.

It knows ASGI and the contract's errors; it knows nothing of chat, completions or engines.

    request -> RequestIdMiddleware -> CORS -> GateMiddleware (key, last resort) -> route -> Response | EventStream
"""

import asyncio
import json
import logging
import re
import secrets
import signal
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import pydantic_core
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.engine import EngineDeadError, EngineError, QueueFullError, RequestError

logger = logging.getLogger("uvicorn.error")
T = TypeVar("T")

PING_SECONDS = 15.0  # silence on a stream after which a comment keeps proxies from closing it
MAX_BODY_BYTES = 8 * 2**20  # several times the text of the longest context that is served here
MAX_DETAILS = 20  # errors told of one request
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

# --- errors -----------------------------------------------------------------------------------------------------------


def error_body(
    message: str, type: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The one shape of every error."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def engine_error(error: EngineError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers for what an engine raised."""
    if isinstance(error, RequestError):
        return 400, error_body(str(error), param=error.param, code=error.code), {}
    if isinstance(error, QueueFullError):
        return 429, error_body(str(error), "rate_limit_error", code="rate_limit_exceeded"), {"Retry-After": "1"}
    if isinstance(error, EngineDeadError):
        return 503, error_body(str(error), "server_error", code="server_error"), {"Retry-After": "1"}
    return 500, error_body(str(error), "server_error", code="server_error"), {"x-should-retry": "false"}


def _handle_engine_error(request: Request, error: EngineError) -> Response:
    status, body, headers = engine_error(error)
    return JSONResponse(body, status, headers)


def _handle_http_exception(request: Request, error: HTTPException) -> Response:
    return JSONResponse(error_body(str(error.detail)), error.status_code, error.headers)


def _handle_validation_error(request: Request, error: RequestValidationError) -> Response:
    # FastAPI's own answer repeats the input, which may hold what JSON can't: NaN, lone surrogates, raw bytes.
    errors = error.errors()[:MAX_DETAILS]
    detail = [{key: value for key, value in e.items() if key in ("type", "loc", "msg")} for e in errors]
    first, context = detail[0], errors[0].get("ctx", {})
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        param, message = "body", f"the body isn't valid JSON: {context['error']}"
    elif first["type"] == "contradiction":
        param, message = context["param"], first["msg"]
    elif place:
        param, message = place[0], f"{'.'.join(place)}: {first['msg']}"
    else:
        param, message = "body", first["msg"]
        if request.headers.get("content-type", "").split(";")[0] != "application/json":
            message = "send the request as JSON, with the header Content-Type: application/json"
    return JSONResponse(error_body(message, param=param) | {"detail": detail}, 422)


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(EngineError, _handle_engine_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _handle_http_exception)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _handle_validation_error)  # type: ignore[arg-type]


class StrictJSONRoute(APIRoute):
    """A route whose body must be JSON in UTF-8, as RFC 8259 has it; everything else is a 422.

    Python's own parser lets lone surrogates through, which fail later in the tokenizer, and raises other errors than
    FastAPI expects for raw bytes, for numbers of thousands of digits and for thousands of nested lists.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()

        async def with_strict_json(request: Request) -> Response:
            return await handler(_StrictJSONRequest(request.scope, request.receive))

        return with_strict_json


class _StrictJSONRequest(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            body = bytearray()
            async for chunk in self.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body is too large: at most {MAX_BODY_BYTES // 2**20} MB are read")
            self._body = bytes(body)
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = pydantic_core.from_json(body)
            except ValueError as error:
                raise json.JSONDecodeError(str(error), "", 0) from None
        return self._json


# --- middleware, pure ASGI so that streams pass through untouched -----------------------------------------------------


class RequestIdMiddleware:
    """Put `x-request-id` on every response: the client's if it is sane, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class GateMiddleware:
    """Ask for the key, if there is one, and turn whatever nobody caught into a 500 with a body.

    It stands inside CORS, so that a browser can read these errors too.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app = app
        self._expected = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if not self._may_pass(scope):
            message = "a valid key is needed: send the header Authorization: Bearer <API_KEY>"
            body = error_body(message, code="invalid_api_key")
            return await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except Exception:
            logger.exception("a request failed in the server")
            if started:
                raise  # too late for a status: the server must break the connection off
            error = error_body("the request failed inside the server", "server_error", code="server_error")
            await JSONResponse(error, 500, {"x-should-retry": "false"})(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if self._expected is None or scope["method"] == "OPTIONS" or scope["path"] == "/health":
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(key.strip().encode("latin-1"), self._expected)


# --- clients and servers that go away ---------------------------------------------------------------------------------


@contextmanager
def before_stop_signals(callback: Callable[[], object]) -> Iterator[None]:
    """Call `callback` on the event loop when SIGINT or SIGTERM comes, before the handler that is there.

    uvicorn waits for open streams before it tells the app that it stops, and for ever: only the signal comes in time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    loop = asyncio.get_running_loop()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def chained(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(callback)
        handler = handlers[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for number, handler in handlers.items():
        if callable(handler):  # a server's own; without one, the signal keeps its default effect
            signal.signal(number, chained)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None, with `work` cancelled, if the client goes away first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait({working, leaving})


class EventStream(Response):
    """A stream of server-sent events that ends when its client does.

    events: what to send. close: called at the end in any case.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._events, self._close = events, close
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        finally:
            self._close()

    def init_headers(self, headers: Any = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in with_pings(self._events):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_pings(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events, and a comment after each PING_SECONDS without one."""
    while True:
        following = asyncio.ensure_future(_next_or_none(events))
        try:
            while not (await asyncio.wait({following}, timeout=PING_SECONDS))[0]:
                yield b": ping\n\n"
        finally:
            following.cancel()
        data = following.result()
        if data is None:
            return
        yield data


async def _next_or_none(events: AsyncIterator[bytes]) -> bytes | None:
    return await anext(events, None)
