"""Send a workload to an OpenAI-compatible server and time every answer.

It counts tokens from `usage` alone: a chunk can carry several tokens, or none. It knows no engine and no percentile.

    Workload -> a task a conversation -> POST /v1/chat/completions, streamed -> Outcome a request
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from shared.engine import SetupError
from shared.workload import Conversation, Workload


@dataclass(frozen=True)
class Outcome:
    """One request, with times in seconds since it was sent. `error` is None if the answer came whole."""

    e2e_s: float
    ttft_s: float | None = None  # to the first text; None if there was none
    prompt_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, whose time is TTFT. None if there was only one."""
        if self.ttft_s is None or self.completion_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.completion_tokens - 1)


class BadAnswerError(Exception):
    """The server's answer is an error, or isn't whole."""


class Answer:
    """One streamed answer as it comes in, frame by frame."""

    def __init__(self) -> None:
        self.text = ""
        self.first_s: float | None = None  # by the clock of `time.perf_counter`, as is done_s
        self.done_s: float | None = None
        self.finished_s: float | None = None  # when the last token was told; some servers send no [DONE] after it
        self.usage: tuple[int, int] | None = None  # tokens of the prompt, of the completion

    def feed(self, data: str, now: float) -> None:
        """Take the data of one frame that came at `now`. Raises BadAnswerError."""
        if data == "[DONE]":
            self.done_s = now
            return
        try:
            frame = json.loads(data)
            if frame.get("error"):
                raise BadAnswerError(f"error frame: {error_message(frame)}")
            for choice in frame.get("choices") or []:
                delta = choice.get("delta") or {}
                content = delta.get("content") or ""
                # Some servers send a model's thoughts apart from its answer. They are tokens just the same.
                if self.first_s is None and (content or delta.get("reasoning_content") or delta.get("reasoning")):
                    self.first_s = now
                self.text += content
                if choice.get("finish_reason") is not None:
                    self.finished_s = now
            if frame.get("usage"):
                self.usage = int(frame["usage"]["prompt_tokens"]), int(frame["usage"]["completion_tokens"])
        except (ValueError, TypeError, AttributeError, LookupError):
            raise BadAnswerError("a frame that isn't of the API's form") from None

    def outcome(self, began: float) -> Outcome:
        """What the whole answer to a request sent at `began` was. Raises BadAnswerError if it isn't whole."""
        done_s = self.done_s or self.finished_s
        if done_s is None:
            raise BadAnswerError("the stream ended without [DONE]")
        if self.usage is None:
            raise BadAnswerError("no usage in the stream: the server ignores stream_options.include_usage")
        prompt_tokens, completion_tokens = self.usage
        ttft_s = None if self.first_s is None else self.first_s - began
        return Outcome(done_s - began, ttft_s, prompt_tokens, completion_tokens, self.text)


class ChatClient:
    """Many requests at a time to one server, which is at `base_url` ("http://host:port/v1"). An async context manager.

    timeout_s: for each request, from sending it to the end of its answer.
    ignore_eos: ask for answers of exactly max_tokens tokens.
    """

    def __init__(
        self, base_url: str, model: str = "", api_key: str = "", timeout_s: float = 600, ignore_eos: bool = True
    ) -> None:
        self.base_url, self.model, self.api_key = base_url, model, api_key
        self.timeout_s, self.ignore_eos = timeout_s, ignore_eos

    async def __aenter__(self) -> "ChatClient":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # by default it would hold back all above 100
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def find_model(self) -> str:
        """The id of the first model that the server names. Raises SetupError if it doesn't answer as it should."""
        url = f"{self.base_url}/models"
        try:
            async with self._session.get(url) as response:
                body = await response.read()
                if response.status != 200:
                    raise BadAnswerError(f"HTTP {response.status}: {error_message(body)}")
                return str(json.loads(body)["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, BadAnswerError, ValueError, TypeError, LookupError) as error:
            raise SetupError(
                f"{url}: no model is named there ({error or type(error).__name__}). Is an OpenAI API served there?"
            ) from None

    async def chat(self, messages: list[dict[str, str]], max_tokens: int) -> Outcome:
        """Send one request and read its answer to the end. What goes wrong is told in the outcome."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }
        answer, began = Answer(), time.perf_counter()
        try:
            async with self._session.post(f"{self.base_url}/chat/completions", json=body) as response:
                if response.status != 200:
                    raise BadAnswerError(f"HTTP {response.status}: {error_message(await response.read())}")
                async for line in response.content:
                    if line.startswith(b"data:"):
                        answer.feed(line[5:].decode(errors="replace").strip(), time.perf_counter())
            return answer.outcome(began)
        except TimeoutError:
            return failure(began, f"no whole answer within {self.timeout_s:g} s")
        except BadAnswerError as error:
            return failure(began, str(error))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return failure(began, f"{type(error).__name__}: {error}")


def failure(began: float, reason: str) -> Outcome:
    return Outcome(time.perf_counter() - began, error=" ".join(reason.split())[:200])


def error_message(body: bytes | dict) -> str:
    """What an error says, in the form of the API or any other."""
    try:
        parsed = json.loads(body) if isinstance(body, bytes) else body
        error = parsed["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, LookupError):
        return body.decode(errors="replace") if isinstance(body, bytes) else str(body)


async def run_workload(
    client: ChatClient, workload: Workload, on_done: Callable[[], object] = lambda: None
) -> tuple[list[Outcome], float]:
    """Send all of `workload`; calls `on_done` after each request.

    Returns the outcomes, each conversation's in a row, and the seconds from the beginning to the last answer.
    """
    gate = asyncio.Semaphore(workload.concurrency or len(workload.conversations))
    began = time.perf_counter()

    async def converse(conversation: Conversation) -> list[Outcome]:
        await asyncio.sleep(began + conversation.arrival_s - time.perf_counter())
        async with gate:
            outcomes: list[Outcome] = []
            for turn in conversation.turns:
                if outcomes and outcomes[-1].error is not None:
                    outcomes.append(Outcome(0.0, error="not sent: the turn before it failed"))
                else:
                    await asyncio.sleep(turn.think_s)
                    messages = conversation.messages([outcome.text for outcome in outcomes])
                    outcomes.append(await client.chat(messages, turn.max_tokens))
                on_done()
        return outcomes

    conversations = await asyncio.gather(*(converse(conversation) for conversation in workload.conversations))
    return [outcome for outcomes in conversations for outcome in outcomes], time.perf_counter() - began
