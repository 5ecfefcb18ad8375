"""Chapter 9's engine: a thread of its own runs one step after the other, and requests join and leave at every step.

It knows queues, the scheduler, the cache and the model. It knows no HTTP: a handler submits and reads deltas.

    frontend.py, any thread:   submit, abort --> inbox                         deltas --> the request's reader
                                                   v                             ^
    here, engine thread:                       scheduler --> plan --> one packed forward --> sample --> append
"""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from ch05_kv_cache.engine import KVCacheConfig
from ch09_async_scheduling.frontend import Frontend
from ch09_async_scheduling.plan import Interrupted, Plan, Request, SlotPlan, StillWanted, run
from ch09_async_scheduling.scheduler import ScheduledSequence, Scheduler
from ch09_async_scheduling.slot_cache import SlotCache
from shared.checkpoint import checkpoint_folder, model_id
from shared.engine import (
    Delta,
    DeltaStream,
    EngineDeadError,
    EngineError,
    EngineStats,
    RequestFailedError,
)
from shared.model import Transformer, load_model
from shared.sampler import sample, token_logprobs
from shared.tokenizer import Tokenizer
from shared.trace import StepTrace

logger = logging.getLogger("uvicorn.error")  # the server's own log


class AsyncConfig(KVCacheConfig):
    max_num_batched_tokens: int = Field(default=512, ge=1, description="tokens of a step: decodes and prefill chunks")
    max_waiting: int = Field(default=256, ge=1, description="choices that may wait; beyond that a request gets 429")
    trace: str | None = Field(default=None, description="a file that gets a JSON line a step")

    @model_validator(mode="after")
    def _every_sequence_gets_a_token(self) -> "AsyncConfig":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"MAX_NUM_BATCHED_TOKENS={self.max_num_batched_tokens} is less than "
                f"MAX_NUM_SEQS={self.max_num_seqs}, and each sequence needs a token in every step. Raise the one or "
                "lower the other."
            )
        return self


class AsyncEngine(Frontend):
    """Continuous batching over slots of a contiguous cache.

    Raises SetupError, one line, if the model, a setting or the cache's size can't be used.
    """

    config_class: type[AsyncConfig] = AsyncConfig

    def __init__(self, config: AsyncConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or self.config_class()
        folder = checkpoint_folder(config.model)
        self.model_id = model_id(config.model)
        self.tokenizer = Tokenizer(folder)
        self.device = config.torch_device()
        self.model = self.make_model(folder)
        self.max_model_len = config.context_length(self.model.max_model_len)
        self.max_waiting = config.max_waiting
        self.scheduler = self.make_scheduler()
        self._trace = StepTrace(config.trace) if config.trace else None
        config.announce(self.max_model_len)

    # --- what another cache or model replaces -------------------------------------------------------------------------

    def make_model(self, folder: Path) -> Transformer:
        return load_model(folder, self.config.torch_dtype(), self.device)

    def make_scheduler(self) -> Scheduler:
        """The cache, and the scheduler that hands it out."""
        c = self.config
        self.cache = SlotCache(self.model.config, c.max_num_seqs, self.max_model_len, c.torch_dtype(), self.device)
        return Scheduler(self.cache, c.max_num_seqs, c.max_num_batched_tokens)

    def to_prefill(self, request: Request) -> list[ScheduledSequence]:
        """The choices whose prompt is to be computed: here each computes its own."""
        return request.sequences

    def branch(self, sampled: list[tuple[ScheduledSequence, int]]) -> list[tuple[ScheduledSequence, int]]:
        """Sequences whose next token is sampled, each with its row of the logits; choices may join them."""
        return sampled

    def order(self, step: list[tuple[ScheduledSequence, int]]) -> list[tuple[ScheduledSequence, int]]:
        """A step's sequences in the order in which the cache wants them packed."""
        return sorted(step, key=lambda item: (item[1] > 1, item[0].slot))

    def plan(self, step: list[tuple[ScheduledSequence, int]], rows: list[int]) -> Plan:
        return SlotPlan(
            token_ids=[token for seq, count in step for token in seq.tokens(seq.computed, count)],
            starts=[seq.computed for seq, _ in step],
            counts=[count for _, count in step],
            rows=rows,
            slots=[seq.slot for seq, _ in step if seq.slot is not None],
        )

    def forward(self, plan: Plan, still_wanted: StillWanted) -> Tensor:
        """Run a plan and return the logits [R, V]. `still_wanted` is called once a layer and may raise Interrupted."""
        assert isinstance(plan, SlotPlan)
        self.cache.begin_step(plan.slots, plan.starts, plan.counts)
        return run(self.model, plan, self.cache.attend, still_wanted)

    def after_loop(self) -> None:
        """Called at the end of the engine thread, whatever ended it."""

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    def stats(self) -> EngineStats:
        return EngineStats(running=self.running, waiting=self.waiting)

    def memory(self) -> tuple[int, int]:
        """(used, all) of whatever the cache hands out, for the trace."""
        return self.cache.num_used, self.cache.num_slots

    # --- the engine thread: nothing below is called from another ------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._read_inbox()
                if self.scheduler.has_work and not self._stopping:
                    self.step()
            self._end_all(EngineDeadError("the server is stopping"))
        except BaseException as error:
            logger.exception("the engine's loop has died")
            with self._lock:
                self._error = f"the engine's loop has died: {type(error).__name__}"
            self._end_all(EngineDeadError(self._error))
        self.after_loop()
        if self._trace:
            self._trace.close()

    def _read_inbox(self) -> None:
        """Take in what has come; sleep in the queue if there is nothing else to do."""
        wait = not self.scheduler.has_work
        while wait or not self._inbox.empty():
            kind, request = self._inbox.get()
            wait = False
            unended = kind == "add" and self._requests.get(request.id) is request
            if unended:
                for seq in request.sequences:
                    seq.owner = request
                for seq in self.to_prefill(request):
                    self.scheduler.add(seq)
                if self._trace:
                    self._trace.arrived(request.id, request.arrived)
            elif kind == "abort":
                self._end(request, None)
            elif kind == "fail":
                raise RuntimeError(request)
        self._send()

    def step(self) -> None:
        """One step: schedule, run, sample, send."""
        began = time.perf_counter()
        step = self.order(self.scheduler.schedule())
        # The rows of whose hidden states something is read: the last of a sequence, or all of a scored prompt.
        sampled: list[tuple[ScheduledSequence, int]] = []
        rows: list[int] = []
        wanted: list[tuple[ScheduledSequence, int, int]] = []  # the third: where its rows begin in the logits
        row = 0
        for seq, count in step:
            if seq.scores_prompt:
                wanted.append((seq, count, len(rows)))
                rows += range(row, row + count)
            elif count == seq.left:
                rows.append(row + count - 1)
            if count == seq.left:
                sampled.append((seq, len(rows) - 1))
            row += count
        traced = [(seq.owner.id, seq.index, count, seq.phase) for seq, count in step] if self._trace else []
        try:
            logits = self.forward(self.plan(step, rows), self._still_wanted(step))
        except Interrupted:
            self._trace_step(began, traced, interrupted=True)
            return
        for seq, count, at in wanted:
            self._score_prompt(seq, count, logits[at : at + count])
        for seq, count in step:
            self.scheduler.advance(seq, count)
        sampled = self.branch(sampled)
        for seq, _ in sampled:
            if seq.max_tokens == 0:
                self._deliver(seq, seq.finish_without_output())
        sampled = [item for item in sampled if not item[0].finished]
        if sampled:
            ats = [row for _, row in sampled]
            asked = logits if ats == list(range(len(logits))) else logits[ats]  # without a copy in the usual case
            self._sample(asked, [seq for seq, _ in sampled])
        self._send()
        self.observe_step(time.perf_counter() - began)
        self._trace_step(began, traced)

    def _trace_step(self, began: float, traced: list[tuple[str, int, int, str]], interrupted: bool = False) -> None:
        if self._trace:
            counts = len(self.scheduler.running), len(self.scheduler.waiting)
            self._trace.step(began, traced, *counts, self.memory(), interrupted)

    def _still_wanted(self, step: list[tuple[ScheduledSequence, int]]) -> StillWanted:
        requests = {seq.owner for seq, _ in step}

        def check() -> None:
            if self._stopping or all(request.aborted for request in requests):
                raise Interrupted

        return check

    def _score_prompt(self, seq: ScheduledSequence, count: int, logits: Tensor) -> None:
        """Log-probabilities of the tokens that follow the `count` new ones, as far as they are the prompt's."""
        following = seq.prompt_ids[seq.computed + 1 : seq.computed + 1 + count]
        if following:
            seq.scored += token_logprobs(logits[: len(following)], following, seq.params.prompt_logprobs or 0)
        if count == seq.left:
            seq.prompt_logprobs = (None, *seq.scored)

    def _sample(self, logits: Tensor, sequences: list[ScheduledSequence]) -> None:
        """Append a token to each; if that fails, to each alone, so that only those that fail by themselves end."""
        states = {seq: seq.generator.get_state() for seq in sequences if not seq.params.greedy}
        try:
            tokens: list[Any] = sample(logits, sequences)
        except Exception:
            tokens = []
            for row, seq in enumerate(sequences):
                if seq in states:
                    seq.generator.set_state(states[seq])  # a number that was drawn in vain would change its text
                try:
                    tokens += sample(logits[row : row + 1], [seq])
                except Exception as error:
                    tokens.append(error)
        for seq, token in zip(sequences, tokens, strict=True):
            try:
                if isinstance(token, Exception):
                    raise token
                delta = seq.append(*token)
            except Exception as error:
                self._fail(seq.owner, error)
            else:
                self._deliver(seq, delta)

    def _deliver(self, seq: ScheduledSequence, delta: Delta) -> None:
        request = seq.owner
        request.put(replace(delta, index=seq.index) if seq.index else delta)
        if seq.finished:
            with self._lock:
                request.unfinished -= 1
                self._unfinished -= 1
            self.scheduler.remove(seq)
            if request.unfinished == 0:
                self._end(request, None)

    def _fail(self, request: Request, error: Exception) -> None:
        if not isinstance(error, EngineError):
            logger.error("a request failed inside the engine", exc_info=error)
            error = RequestFailedError(f"the request failed inside the engine: {type(error).__name__}")
        self._end(request, error)

    def _end(self, request: Request, error: Exception | None) -> None:
        """Forget a request and tell its reader. Good in every state, and more than once."""
        with self._lock:
            if self._requests.get(request.id) is not request:
                return
            del self._requests[request.id]
            self._unfinished -= request.unfinished
        for seq in request.sequences:
            self.scheduler.remove(seq)
        if error is not None:
            request.put(error)
        request.put(None)
        if self._trace:
            self._trace.ended(request.id, "aborted" if request.aborted else "failed" if error else "done")

    def _end_all(self, error: Exception) -> None:
        with self._lock:
            requests = list(self._requests.values())
        for request in requests:
            self._end(request, error)
        self._send()

    def _send(self) -> None:
        """Wake each event loop once with all that the step has for its requests."""
        for loop, items in list(self._outbox.items()):
            del self._outbox[loop]
            DeltaStream.put_all(loop, items)
