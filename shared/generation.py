"""The engine's side of one HTTP request: its prompts are submitted together, read as one stream, and ended together.

It knows the online interface and the metrics; it knows nothing of JSON or HTTP.

    prompts -> engine.submit, once a prompt -> deltas of all, merged -> choice index = prompt index * n + k
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from shared.engine import (
    Delta,
    GenerateResult,
    OnlineInterface,
    RequestError,
    RequestFailedError,
    RequestMetrics,
    SamplingParams,
)
from shared.metrics import ServerMetrics


@dataclass
class _Choice:
    """What has come of one choice so far."""

    tokens: int = 0
    first_at: float = 0.0
    finished: bool = False
    cached_tokens: int | None = None


class Generation:
    """All choices for all prompts of one request. `close` must be called at the end, whatever happened.

    prompts: token ids of each prompt; params: the parameters of each, all with the same n.
    Submits everything or nothing: raises what `engine.submit` raises.
    """

    def __init__(
        self,
        engine: OnlineInterface,
        metrics: ServerMetrics,
        request_id: str,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
    ) -> None:
        self.prompts = prompts
        self.n = params[0].n
        self._engine, self._metrics = engine, metrics
        self._choices = [_Choice() for _ in range(len(prompts) * self.n)]
        self._began = time.perf_counter()
        self._failed = False
        self._ids = [f"{request_id}-{i}" for i in range(len(prompts))]
        self._streams: list[AsyncIterator[Delta]] = []
        try:
            for engine_id, prompt, p in zip(self._ids, prompts, params, strict=True):
                self._streams.append(engine.submit(engine_id, prompt, p))
        except Exception:
            for engine_id in self._ids:
                engine.abort(engine_id)
            metrics.requests.labels("rejected").inc(len(self._choices))
            raise
        self._open = len(prompts)  # streams that haven't ended
        self._merged: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
        several = list(enumerate(self._streams)) if len(prompts) > 1 else []
        self._pumps = [asyncio.create_task(self._pump(number, stream)) for number, stream in several]
        self._peeked: list[Delta] = []

    async def peek(self) -> bool:
        """Wait for the first delta, so that an error before it can still become an HTTP status."""
        self._peeked.append(await anext(self._observed()))
        return True

    async def deltas(self) -> AsyncIterator[Delta]:
        """Every delta of every choice, its `index` counted over all prompts. Raises EngineError."""
        for delta in self._peeked:
            yield delta
        async for delta in self._observed():
            yield delta

    async def results(self) -> list[GenerateResult]:
        """Wait for all choices, in order of their index. Raises EngineError."""
        deltas: dict[int, list[Delta]] = defaultdict(list)
        async for delta in self.deltas():
            deltas[delta.index].append(delta)
        return [GenerateResult.from_deltas(deltas[index]) for index in range(len(self._choices))]

    def usage(self) -> dict[str, object]:
        """OpenAI's usage: each prompt counted once, the completions of all choices summed."""
        usage: dict[str, object] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }
        cached = [choice.cached_tokens for choice in self._choices[:: self.n]]
        if any(tokens is not None for tokens in cached):
            usage["prompt_tokens_details"] = {"cached_tokens": sum(tokens or 0 for tokens in cached)}
        return usage

    def summary(self, results: Sequence[GenerateResult]) -> RequestMetrics:
        """The engine's metrics of a single choice; of several, their sums and the rate of them all."""
        if len(results) == 1:
            return results[0].metrics
        return RequestMetrics(
            input_tokens=self._prompt_tokens,
            output_tokens=self._completion_tokens,
            throughput=round(self._completion_tokens / (time.perf_counter() - self._began), 3),
        )

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def _completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self._choices)

    def close(self) -> None:
        """Abort what still runs and count how it ended. It never waits, so that nothing can interrupt it."""
        for engine_id in self._ids:
            self._engine.abort(engine_id)
        for task in self._pumps:
            task.cancel()
        unfinished = [choice for choice in self._choices if not choice.finished]
        self._metrics.requests.labels("error" if self._failed else "aborted").inc(len(unfinished))
        for choice in unfinished:
            choice.finished = True

    async def _observed(self) -> AsyncIterator[Delta]:
        """Count each delta on its way, and make sure that no choice ends without a finish_reason."""
        try:
            while (item := await self._next()) is not None:
                prompt, delta = item
                delta = replace(delta, index=prompt * self.n + delta.index)
                self._observe(delta)
                yield delta
            if not all(choice.finished for choice in self._choices):
                raise RequestFailedError("the engine ended the request before it was finished")
        except Exception as error:
            self._failed = not isinstance(error, RequestError)
            raise

    async def _next(self) -> tuple[int, Delta] | None:
        """(prompt, delta) of whichever stream has one; None when all have ended. Raises the first error of any."""
        if not self._pumps:  # the usual case, one prompt, needs no task
            delta = await anext(self._streams[0], None)
            return None if delta is None else (0, delta)
        while self._open:
            item = await self._merged.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._open -= 1
        return None

    async def _pump(self, number: int, stream: AsyncIterator[Delta]) -> None:
        try:
            async for delta in stream:
                self._merged.put_nowait((number, delta))
            self._merged.put_nowait(None)
        except Exception as error:  # whatever it is, the reader must not wait for ever
            self._merged.put_nowait(error)

    def _observe(self, delta: Delta) -> None:
        now, metrics, choice = time.perf_counter(), self._metrics, self._choices[delta.index]
        if not choice.first_at:
            choice.first_at = now
            metrics.ttft.observe(now - self._began)
            if delta.index % self.n == 0:
                metrics.prompt_tokens.inc(len(self.prompts[delta.index // self.n]))
        choice.tokens += len(delta.token_ids)
        metrics.generation_tokens.inc(len(delta.token_ids))
        if delta.finish_reason is not None:
            choice.finished = True
            choice.cached_tokens = delta.metrics.cached_tokens if delta.metrics else None
            metrics.requests.labels(delta.finish_reason).inc()
            metrics.e2e.observe(now - self._began)
            if choice.tokens > 1:
                metrics.tpot.observe((now - choice.first_at) / (choice.tokens - 1))
