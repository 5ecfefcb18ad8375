"""Serve a blocking engine: one thread runs it, one request after the other, and the event loop stays free.

It knows the contract only. A request that is cancelled while it waits costs nothing; one that runs stops within a
second.

    submit -> queue -> engine thread: engine.stream(...) -> DeltaStream -> event loop
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from shared.engine import (
    BaseOfflineEngine,
    DeltaStream,
    EngineDeadError,
    EngineError,
    EngineStats,
    OnlineInterface,
    QueueFullError,
    RequestFailedError,
    SamplingParams,
    TokenIds,
)

logger = logging.getLogger("uvicorn.error")  # the server's own log


class OneAtATime:
    """The lock of a blocking engine: a second thread waits; the same thread gets an error instead of a deadlock.

    A stream may be closed by another thread than the one that began it, so an RLock won't do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise RuntimeError("this thread is still reading another stream of this engine: finish or close it first")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *exc_info: object) -> None:
        self._owner = None
        self._lock.release()


class _Cancelled(Exception):
    pass


@contextmanager
def interruptible(model: torch.nn.Module, cancel: threading.Event | None) -> Iterator[None]:
    """Leave the block without an error at the next linear layer of `model` that is called once `cancel` is set.

    A pass over a long prompt takes many seconds; a client that has gone shouldn't cost them.
    """

    def check(module: torch.nn.Module, args: object) -> None:
        if cancel is not None and cancel.is_set():
            raise _Cancelled

    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    handles = [layer.register_forward_pre_hook(check) for layer in layers] if cancel is not None else []
    try:
        yield
    except _Cancelled:
        pass
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Job:
    deltas: DeltaStream
    cancel: threading.Event
    token_ids: list[int]
    future: Future[None] | None = None


class BlockingFrontend(OnlineInterface):
    """The server's view of a blocking engine: first come, first served, at most `engine.max_waiting` waiting."""

    def __init__(self, engine: BaseOfflineEngine) -> None:
        self.engine = engine
        self.observe_step: Callable[[float], None] = lambda seconds: None
        self._jobs: dict[str, _Job] = {}  # touched on the event loop only
        self._executor: ThreadPoolExecutor | None = None
        self._running = False

    async def start(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    def submit(self, request_id: str, token_ids: TokenIds, params: SamplingParams) -> DeltaStream:
        if self._executor is None:
            raise EngineDeadError(self.error())
        self.engine.check_request(token_ids, params)
        if self.stats().waiting >= self.engine.max_waiting:
            raise QueueFullError(f"{self.engine.max_waiting} requests are waiting already: try again later")
        job = _Job(DeltaStream(), threading.Event(), list(token_ids))
        self._jobs[request_id] = job
        job.future = self._executor.submit(self._run, job, params)
        return job.deltas

    def abort(self, request_id: str) -> None:
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.cancel.set()
            if job.future is not None and job.future.cancel():  # it hadn't begun
                job.token_ids = []  # the executor keeps the job until its turn comes
                job.deltas.put(None)

    def stats(self) -> EngineStats:
        waiting = sum(
            job.future is not None and not (job.future.running() or job.future.done()) for job in self._jobs.values()
        )
        return EngineStats(running=int(self._running), waiting=waiting)

    def error(self) -> str | None:
        return "the engine isn't running: it is starting or stopping" if self._executor is None else None

    async def shutdown(self) -> None:
        executor, self._executor = self._executor, None
        for request_id in list(self._jobs):
            self._jobs[request_id].deltas.put(EngineDeadError("the server is stopping"))
            self.abort(request_id)
        if executor is not None:
            await asyncio.to_thread(executor.shutdown)

    def _run(self, job: _Job, params: SamplingParams) -> None:
        """One request, all its choices one after the other, in the engine's thread."""
        self._running = True
        try:
            for k in range(params.n):
                began = time.perf_counter()
                for delta in self.engine.stream(job.token_ids, params=params.for_choice(k), cancel=job.cancel):
                    self.observe_step(time.perf_counter() - began)
                    job.deltas.put(replace(delta, index=k))
                    began = time.perf_counter()
        except EngineError as error:
            job.deltas.put(error)
        except Exception as error:
            logger.exception("a request failed inside the engine")
            job.deltas.put(RequestFailedError(f"the request failed inside the engine: {type(error).__name__}"))
        finally:
            self._running = False
            job.deltas.put(None)
