"""The callers' side of an engine with a loop of its own: submit, abort and read, from the event loop or without one.

It knows the inbox and the requests that are open. It knows no scheduler, cache or model: the engine's thread does.

    submit, abort -> inbox -> (engine thread) -> put -> DeltaStream of a handler, or a queue of a caller without a loop
"""

import asyncio
import itertools
import queue
import threading
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ch09_async_scheduling.plan import Item, Put, Request
from ch09_async_scheduling.scheduler import ScheduledSequence
from shared.engine import (
    BaseOnlineEngine,
    Delta,
    DeltaStream,
    EngineDeadError,
    GenerateResult,
    QueueFullError,
    RequestError,
    SamplingParams,
    TokenIds,
)

NOT_RUNNING = "the engine isn't running: it is starting or stopping"


def _put_numbered(items: queue.SimpleQueue[tuple[int, Item]], number: int, item: Item) -> None:
    items.put((number, item))


class Frontend(BaseOnlineEngine):
    """Everything that other threads may call. What they share with the engine's thread is guarded by `_lock`."""

    sequence_class: type[ScheduledSequence] = ScheduledSequence

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[DeltaStream, Item]]] = defaultdict(list)
        self._ids = itertools.count()
        self._lock = threading.Lock()  # guards the rest
        self._requests: dict[str, Request] = {}
        self._unfinished = 0  # choices of all requests
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._error: str | None = NOT_RUNNING

    @abstractmethod
    def _loop(self) -> None:
        """What the engine's thread does until `_stopping`."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Choices that run now."""

    def before_loop(self) -> None:
        """Called before the engine thread starts."""

    async def start(self) -> None:
        self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self.before_loop()
                self._stopping, self._error = False, None
                self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
                self._thread.start()

    def submit(self, request_id: str, token_ids: TokenIds, params: SamplingParams) -> DeltaStream:
        deltas, loop = DeltaStream(), asyncio.get_running_loop()
        self._submit(request_id, lambda item: self._outbox[loop].append((deltas, item)), token_ids, params)
        return deltas

    def _submit(self, request_id: str, put: Put, token_ids: TokenIds, params: SamplingParams) -> None:
        self.check_request(token_ids, params)
        if params.n > self.max_waiting:
            raise RequestError(f"n: {params.n} choices never fit a queue of MAX_WAITING={self.max_waiting}", param="n")
        sequences = [
            self.sequence_class(token_ids, params.for_choice(k), self.tokenizer, self.max_model_len, k)
            for k in range(params.n)
        ]
        with self._lock:
            if self._error is not None:
                raise EngineDeadError(self._error)
            if request_id in self._requests:
                raise RequestError(f"a request with the id {request_id} is open already: choose another")
            if self.waiting + params.n > self.max_waiting:
                raise QueueFullError(f"{self.waiting} of at most {self.max_waiting} requests are waiting: try later")
            request = self._requests[request_id] = Request(request_id, put, sequences, params.n)
            self._unfinished += params.n
        self._inbox.put(("add", request))

    def abort(self, request_id: str) -> None:
        with self._lock:
            request = self._requests.get(request_id)
        if request is not None and not request.aborted:
            request.aborted = True
            self._inbox.put(("abort", request))

    @property
    def waiting(self) -> int:
        """Choices that were submitted and don't run yet, in the inbox or in the queue."""
        return max(0, self._unfinished - self.running)

    def error(self) -> str | None:
        return self._error

    async def shutdown(self) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End every open request with an error, and the thread. Idempotent; the engine can be started again."""
        with self._lock:
            thread = self._thread
            if thread is None:
                return
            self._stopping = True
            self._error = self._error or NOT_RUNNING
        self._inbox.put(("stop", None))
        thread.join()
        with self._lock:
            self._thread = None

    # --- the same without a server ------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | TokenIds,
        max_new_tokens: int | None = None,
        params: SamplingParams | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Delta]:
        params = params or SamplingParams()
        if max_new_tokens is not None:
            params = replace(params, max_tokens=max_new_tokens)
        if params.n != 1:
            raise RequestError("a stream is one choice: n must be 1 here; generate_batch takes any n", param="n")
        self._start()
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        request_id = f"stream-{next(self._ids)}"
        self._submit(request_id, items.put, self.encode_prompt(prompt), params)
        try:
            while cancel is None or not cancel.is_set():
                try:
                    item = items.get(timeout=None if cancel is None else 0.05)
                except queue.Empty:
                    continue
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    return
                yield item
        finally:
            self.abort(request_id)

    def generate_batch(
        self, prompts: Sequence[str | TokenIds], params: SamplingParams | None = None
    ) -> list[GenerateResult]:
        """As the contract says. All are submitted as far as the queue takes them, and batched as they come."""
        requests = self.choices(prompts, params or SamplingParams())
        self._start()
        items: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
        deltas: list[list[Delta]] = [[] for _ in requests]
        ids: dict[int, str] = {}  # of those that are submitted and not at their end
        todo = iter(enumerate(requests))
        upcoming = next(todo, None)
        try:
            while ids or upcoming is not None:
                while upcoming is not None and self.waiting < self.max_waiting:
                    number, (token_ids, choice) = upcoming
                    ids[number] = f"batch-{next(self._ids)}"
                    self._submit(ids[number], partial(_put_numbered, items, number), token_ids, choice)
                    upcoming = next(todo, None)
                number, item = items.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    del ids[number]
                else:
                    deltas[number].append(item)
        finally:
            for request_id in ids.values():
                self.abort(request_id)
        return [GenerateResult.from_deltas(each) for each in deltas]
