"""The contract between an engine and everything around it: what it takes, gives, refuses and must be able to do.

It knows no HTTP, no model and no chapter. The server, the benchmarks and the tests are written against it alone.

    messages -> build_prompt -> text -> encode -> token ids -> stream -> Delta, Delta, ... -> GenerateResult
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from shared.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    SetupError,
    UnsupportedParameterError,
)
from shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shared.tokenizer import Tokenizer

__all__ = [
    "BaseOfflineEngine",
    "BaseOnlineEngine",
    "ContentPart",
    "ContextLengthError",
    "Delta",
    "DeltaStream",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "GenerateResult",
    "Message",
    "OnlineInterface",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "RequestMetrics",
    "SamplingParams",
    "SetupError",
    "TokenIds",
    "TokenLogprob",
    "UnsupportedParameterError",
]

FinishReason = Literal["stop", "length"]
# Token ids. A str is a Sequence too, so a function that takes both asks `isinstance(prompt, str)` first.
TokenIds = Sequence[int]

# --- what an engine takes ---------------------------------------------------------------------------------------------


class ContentPart(BaseModel):
    """A part of a message's content. Only text parts are understood; others are kept, to be refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check_text(self) -> "ContentPart":
        if self.type == "text" and self.text is None:
            raise ValueError("a part of type 'text' needs a 'text'")
        return self


class Message(BaseModel):
    """One turn of a conversation. `content` may come as a list of parts; `text` is what the model sees."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        """The content as one string. Raises UnsupportedParameterError if a part isn't text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type not in ("text", "refusal"):
                raise UnsupportedParameterError(
                    f"'messages' with a part of type '{part.type[:50]}' are not supported with this model: "
                    "send parts of type 'text' only",
                    param="messages",
                )
        return "".join((part.refusal if part.type == "refusal" else part.text) or "" for part in self.content)

    def for_template(self) -> dict[str, str]:
        """What a chat template gets. Templates know "system" only, the older name of "developer"."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


# --- what an engine gives ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token, and of the most likely ones at its place, both of the unscaled log-softmax."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True)
class RequestMetrics:
    """What one request cost. Only what the engine knows is set; `as_dict` leaves the rest out."""

    input_tokens: int
    output_tokens: int
    throughput: float  # output tokens per second, from the request's start, or its submission
    ttft_ms: float | None = None  # time to first token
    tpot_ms: float | None = None  # time per output token, without the first
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache

    def as_dict(self) -> dict[str, float | int]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Delta:
    """What one step adds to one choice. The last one has a finish_reason and metrics.

    `text` may be empty while a character is incomplete or could still become a stop string.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of token_ids if asked for
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = (
        None  # on a choice's first delta; nothing precedes token 0
    )
    index: int = 0  # the choice


@dataclass(frozen=True)
class GenerateResult:
    """One finished choice. `text` has no stop string and no special token, `token_ids` has all tokens."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    metrics: RequestMetrics
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @classmethod
    def from_deltas(cls, deltas: Sequence[Delta]) -> "GenerateResult":
        """Join all deltas of one choice, the last of which has a finish_reason."""
        last, prompt_logprobs = deltas[-1], deltas[0].prompt_logprobs
        assert last.finish_reason is not None, "the choice isn't finished"
        assert last.metrics is not None
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        return cls(
            text="".join(delta.text for delta in deltas),
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            finish_reason=last.finish_reason,
            metrics=last.metrics,
            logprobs=logprobs or None,
            prompt_logprobs=None if prompt_logprobs is None else list(prompt_logprobs),
        )


@dataclass(frozen=True)
class EngineStats:
    """What an engine is doing now. `None`: it has no such thing."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int | None = None
    kv_blocks_total: int | None = None
    prefix_cache_hit_tokens: int | None = None  # since the start
    preemptions: int | None = None  # since the start


# --- what an engine must be able to do --------------------------------------------------------------------------------


class BaseOfflineEngine(ABC):
    """An engine that is called: prompts in, results out. From chapter 1 on.

    A subclass sets the three attributes and writes `stream`; the rest follows from it and may be replaced.
    `stream`, and so everything built on it, may be called from several threads; a blocking engine holds a lock and
    serves one after the other.
    """

    model_id: str
    max_model_len: int
    tokenizer: "Tokenizer"
    max_waiting: int = 256  # the server's queue in front of a blocking engine

    @abstractmethod
    def stream(
        self,
        prompt: str | TokenIds,
        max_new_tokens: int | None = None,
        params: SamplingParams | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Delta]:
        """Generate one choice, a Delta a token.

        prompt: text, encoded with the tokenizer's special tokens, or token ids [T], taken as they are.
        max_new_tokens: replaces `params.max_tokens`.
        cancel: once set, the stream ends within a second, without a finish_reason.

        Raises RequestError before the first delta if the request can never be run.
        """

    def generate(
        self,
        prompt: str | TokenIds,
        max_new_tokens: int | None = None,
        params: SamplingParams | None = None,
    ) -> GenerateResult:
        """Generate one choice and return it whole. Raises what `stream` raises."""
        return GenerateResult.from_deltas(list(self.stream(prompt, max_new_tokens, params)))

    def generate_batch(
        self, prompts: Sequence[str | TokenIds], params: SamplingParams | None = None
    ) -> list[GenerateResult]:
        """Generate `params.n` choices for each prompt; choice k of prompt i is at i * n + k.

        Here one after the other. All prompts are checked before the first is run.
        """
        choices = self.choices(prompts, params or SamplingParams())
        return [self.generate(token_ids, params=choice) for token_ids, choice in choices]

    def choices(
        self, prompts: Sequence[str | TokenIds], params: SamplingParams
    ) -> list[tuple[list[int], SamplingParams]]:
        """(token ids, parameters) of each choice of a batch, in order. Raises RequestError if any can never be run."""
        encoded = [self.encode_prompt(prompt) for prompt in prompts]
        for token_ids in encoded:
            self.check_request(token_ids, params)
        return [(token_ids, params.for_choice(k)) for token_ids in encoded for k in range(params.n)]

    def build_prompt(self, messages: Sequence[Message]) -> str:
        """The whole conversation as the text that the model was trained on, ready for the assistant's answer."""
        return self.tokenizer.apply_chat_template([message.for_template() for message in messages])

    def encode_prompt(self, prompt: str | TokenIds) -> list[int]:
        """Token ids [T] of a prompt in either form. Raises ContextLengthError for a text that is far too long."""
        if not isinstance(prompt, str):
            return list(prompt)
        self.check_text(prompt)
        return self.tokenizer.encode(prompt)

    def check_text(self, text: str) -> None:
        """Raise ContextLengthError if `text` can't fit the context, however it is cut into tokens.

        Encoding megabytes takes many seconds, for a request that would be refused in the end.
        """
        at_least = len(text.encode()) // self.tokenizer.longest_token
        if at_least > self.max_model_len:
            raise ContextLengthError(self.max_model_len, at_least, 1)

    def check_request(self, token_ids: TokenIds, params: SamplingParams) -> None:
        """Raise RequestError if this request could never be run, however long it waited."""
        if not token_ids:
            raise RequestError("the prompt is empty: send at least one token", param="prompt")
        least = 1 if params.max_tokens > 0 else 0  # one token must fit, or nothing could be generated
        if len(token_ids) + least > self.max_model_len:
            raise ContextLengthError(self.max_model_len, len(token_ids), least)
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.tokenizer.vocab_size:
                raise RequestError(
                    f"token id {token_id} is out of the vocabulary: ids go from 0 to {self.tokenizer.vocab_size - 1}",
                    param="prompt",
                )


class OnlineInterface(ABC):
    """How the server talks to an engine. All methods are called on the event loop and never block it."""

    observe_step: Callable[[float], None] = staticmethod(lambda seconds: None)  # the server counts steps with it

    @abstractmethod
    async def start(self) -> None:
        """Start threads and ranks. After it, requests can be submitted."""

    @abstractmethod
    def submit(self, request_id: str, token_ids: TokenIds, params: SamplingParams) -> AsyncIterator[Delta]:
        """Queue a request for `params.n` choices; the iterator yields the deltas of all of them as they come.

        Raises RequestError, QueueFullError or EngineDeadError at once. The iterator may raise RequestFailedError or
        EngineDeadError, and ends early after an abort.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Forget a request, in whatever state it is. An unknown or finished one is no error."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    def error(self) -> str | None:
        """Why the engine can't serve requests, or None if it can."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End every open request and every thread and rank. Idempotent."""


class BaseOnlineEngine(BaseOfflineEngine, OnlineInterface):
    """An engine with a loop of its own, from chapter 9 on. It is still usable offline, without a server."""


class DeltaStream:
    """One request's deltas on their way from the engine's thread to one reader on the event loop.

    `put` may be called from any thread; a Delta is yielded, an exception raised, None ends the stream.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    def put(self, item: Delta | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has stopped and nobody reads on
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    @staticmethod
    def put_all(
        loop: asyncio.AbstractEventLoop, items: "Sequence[tuple[DeltaStream, Delta | Exception | None]]"
    ) -> None:
        """`put` for many streams of one event loop, which is woken once: a step has a delta for each request."""

        def deliver() -> None:
            for stream, item in items:
                stream._queue.put_nowait(item)

        with suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver)

    def __aiter__(self) -> "DeltaStream":
        return self

    async def __anext__(self) -> Delta:
        item = await self._queue.get()
        if item is None:
            self._queue.put_nowait(None)  # the end stays the end, however often it is asked for
            raise StopAsyncIteration
        if isinstance(item, Exception):
            self._queue.put_nowait(None)
            raise item
        return item
