"""The HTTP server of every chapter: make_app(engine) answers the OpenAI API for any engine that keeps the contract.

It knows the contract and the API. It doesn't know what the engine is, and it doesn't change between chapters.

    POST -> ChatRequest -> build_prompt -> token ids -> Generation -> _format_response | chat_chunks -> client
"""

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from shared.asgi import (
    EventStream,
    GateMiddleware,
    RequestIdMiddleware,
    StrictJSONRoute,
    add_error_handlers,
    before_stop_signals,
    engine_error,
    error_body,
    unless_disconnected,
)
from shared.blocking import BlockingFrontend
from shared.engine import (
    BaseOfflineEngine,
    BaseOnlineEngine,
    EngineDeadError,
    EngineError,
    GenerateResult,
    Message,
    OnlineInterface,
)
from shared.generation import Generation
from shared.metrics import ServerMetrics
from shared.protocol import ChatRequest, CompletionRequest
from shared.responses import (
    DONE,
    Json,
    chat_chunks,
    chat_logprobs,
    completion_choice,
    completion_chunks,
    event,
)

GRACE_SECONDS = 2.0  # for running requests to finish after Ctrl-C; those that don't end with an error

__all__ = ["ChatRequest", "CompletionRequest", "Message", "make_app"]


def make_app(engine: BaseOfflineEngine) -> FastAPI:
    """The app that serves `engine`. The engine's threads and ranks start with the app's lifespan and end with it.

    If the environment variable API_KEY is set, clients must send it.
    """
    online = engine if isinstance(engine, BaseOnlineEngine) else BlockingFrontend(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await online.start()
        stopping: list[asyncio.Task[None]] = []

        async def stop() -> None:
            await asyncio.sleep(GRACE_SECONDS)
            await online.shutdown()

        try:
            with before_stop_signals(lambda: stopping.append(asyncio.create_task(stop()))):
                yield
        finally:
            await online.shutdown()

    app = FastAPI(title="LLM inference, chapter by chapter", lifespan=lifespan)
    add_error_handlers(app)
    # The last one added is the outermost.
    app.add_middleware(GateMiddleware, api_key=os.environ.get("API_KEY") or None)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=["x-request-id", "retry-after", "x-should-retry"],
    )
    app.add_middleware(RequestIdMiddleware)
    metrics = ServerMetrics(online.stats)
    online.observe_step = metrics.step.observe
    app.include_router(_Routes(engine, online, metrics).router)
    return app


class _Routes:
    """The routes of one app and what they share."""

    def __init__(self, engine: BaseOfflineEngine, online: OnlineInterface, metrics: ServerMetrics) -> None:
        self.engine, self.online, self.metrics = engine, online, metrics
        self.started = int(time.time())
        self.router = router = APIRouter(route_class=StrictJSONRoute)
        router.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        router.add_api_route("/v1/completions", self.completions, methods=["POST"])
        router.add_api_route("/v1/models", self.models, methods=["GET"])
        router.add_api_route("/v1/models/{model_id:path}", self.model, methods=["GET"])
        router.add_api_route("/health", self.health, methods=["GET"])
        router.add_api_route("/health", self.health, methods=["HEAD"], include_in_schema=False)
        router.add_api_route("/metrics", self.prometheus, methods=["GET"])

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        if (refusal := self._refusal(body.model)) is not None:
            return refusal
        body.check_supported()
        encoding = asyncio.to_thread(self._encode_chat, body.messages)
        prompt_ids = await unless_disconnected(request.receive, encoding)
        if prompt_ids is None:
            return _gone()
        params = body.sampling_params(len(prompt_ids), self.engine.max_model_len)
        head = self._head("chatcmpl-", "chat.completion")
        generation = Generation(self.online, self.metrics, head["id"], [prompt_ids], [params])
        if body.stream:
            head["object"] = "chat.completion.chunk"
            chunks = chat_chunks(head, generation, self.engine.tokenizer, body.include_usage)
            return await self._stream(request, generation, chunks)
        results = await self._results(request, generation)
        return _gone() if results is None else JSONResponse(_format_response(head, self.engine, generation, results))

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue one or several texts."""
        if (refusal := self._refusal(body.model)) is not None:
            return refusal
        body.check_supported()
        prompts = body.prompts()
        if len(prompts) * body.n > self.engine.max_waiting:
            message = f"prompt: at most {self.engine.max_waiting // body.n} prompts a request, got {len(prompts)}"
            return JSONResponse(error_body(message, param="prompt"), 400)
        encoding = asyncio.to_thread(lambda: [self.engine.encode_prompt(prompt) for prompt in prompts])
        token_ids = await unless_disconnected(request.receive, encoding)
        if token_ids is None:
            return _gone()
        params = [body.sampling_params(len(ids), self.engine.max_model_len) for ids in token_ids]
        tokenizer = self.engine.tokenizer
        echo = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts] if body.echo else None
        head = self._head("cmpl-", "text_completion")
        generation = Generation(self.online, self.metrics, head["id"], token_ids, params)
        if body.stream:
            chunks = completion_chunks(head, generation, tokenizer, body.include_usage, echo)
            return await self._stream(request, generation, chunks)
        results = await self._results(request, generation)
        if results is None:
            return _gone()

        def respond() -> Response:  # in a thread, for log-probabilities of many prompts make megabytes
            choices = [
                completion_choice(i, result, tokenizer, token_ids[i // body.n], echo[i // body.n] if echo else None)
                for i, result in enumerate(results)
            ]
            metrics = generation.summary(results).as_dict()
            return JSONResponse(head | {"choices": choices, "usage": generation.usage(), "metrics": metrics})

        return await asyncio.to_thread(respond)

    async def models(self) -> Json:
        """The one model that is served."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, model_id: str) -> Response:
        return self._refusal(model_id) or JSONResponse(self._model())

    async def health(self) -> Response:
        """200 once requests can be served."""
        if (error := self.online.error()) is not None:
            raise EngineDeadError(error)
        return JSONResponse({"status": "ok"})

    async def prometheus(self) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        # The template has written the special tokens: none are added.
        text = self.engine.build_prompt(messages)
        self.engine.check_text(text)
        return self.engine.tokenizer.encode(text, add_special_tokens=False)

    def _refusal(self, model: str) -> Response | None:
        if model in ("default", self.engine.model_id):
            return None
        message = f"the model '{model[:100]}' does not exist: this server has '{self.engine.model_id}'"
        return JSONResponse(error_body(message, param="model", code="model_not_found"), 404)

    def _model(self) -> Json:
        return {
            "id": self.engine.model_id,
            "object": "model",
            "created": self.started,
            "owned_by": "local",
            "max_model_len": self.engine.max_model_len,
        }

    def _head(self, prefix: str, kind: str) -> Json:
        """What a response and all chunks of a stream begin with."""
        created = int(time.time())
        return {"id": prefix + uuid.uuid4().hex, "object": kind, "created": created, "model": self.engine.model_id}

    async def _results(self, request: Request, generation: Generation) -> list[GenerateResult] | None:
        """All results, or None if the client went away first."""
        try:
            return await unless_disconnected(request.receive, generation.results())
        finally:
            generation.close()

    async def _stream(self, request: Request, generation: Generation, chunks: AsyncIterator[Json]) -> Response:
        """Wait for the first token, while an error can still be an HTTP status, then stream."""
        try:
            ready = await unless_disconnected(request.receive, generation.peek())
        except BaseException:
            generation.close()
            raise
        if not ready:
            generation.close()
            return _gone()
        return EventStream(_events(chunks), generation.close)


async def _events(chunks: AsyncIterator[Json]) -> AsyncIterator[bytes]:
    """The chunks as events, then [DONE]; an error on the way is told in a last event instead."""
    try:
        async for chunk in chunks:
            yield event(chunk)
    except EngineError as error:
        yield event(engine_error(error)[1])
        return
    yield DONE


def _format_response(
    head: Json, engine: BaseOfflineEngine, generation: Generation, results: Sequence[GenerateResult]
) -> Json:
    """The whole answer to a chat request."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": result.text},
            "logprobs": chat_logprobs(engine.tokenizer, result.logprobs),
            "finish_reason": result.finish_reason,
        }
        for index, result in enumerate(results)
    ]
    metrics = generation.summary(results).as_dict()
    return head | {"choices": choices, "usage": generation.usage(), "metrics": metrics}


def _gone() -> Response:
    """Nobody reads this: the client has closed the connection. nginx's status for it, for the log."""
    return Response(status_code=499)
