"""One choice while it is generated: its tokens, its text, and when it ends. Every chapter's engine works on these.

It knows no model, cache or scheduler: it is told the next token and says what that adds.

    sampled token -> append -> Delta (text, logprobs, finish_reason)
"""

import time
from dataclasses import replace

import torch

from shared.detokenizer import Detokenizer, StopMatcher
from shared.engine import (
    BaseOfflineEngine,
    Delta,
    FinishReason,
    RequestError,
    RequestMetrics,
    SamplingParams,
    TokenIds,
    TokenLogprob,
)
from shared.tokenizer import Tokenizer


class Sequence:
    """A prompt and what has been generated after it.

    prompt_ids [P] and output_ids grow to at most `max_model_len` tokens together. `params` must be for one choice.
    The clock of the metrics starts with the object.
    """

    def __init__(self, prompt_ids: TokenIds, params: SamplingParams, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.prompt_ids = list(prompt_ids)
        self.output_ids: list[int] = []
        self.params = params
        self.max_tokens = min(params.max_tokens, max_model_len - len(self.prompt_ids))
        self.eos_token_ids = tokenizer.eos_token_ids
        self.generator = torch.Generator()  # of its own, so that its neighbours in a batch don't change its draws
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed & (2**64 - 1))
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.finish_reason: FinishReason | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopMatcher(params.stop)
        self.started_at = time.perf_counter()
        self.first_token_at: float | None = None

    @classmethod
    def for_request(
        cls,
        engine: BaseOfflineEngine,
        prompt: str | TokenIds,
        max_new_tokens: int | None = None,
        params: SamplingParams | None = None,
    ) -> "Sequence":
        """The sequence of one call of `engine.stream`. Raises RequestError if it can never be run."""
        params = params or SamplingParams()
        if max_new_tokens is not None:
            params = replace(params, max_tokens=max_new_tokens)
        if params.n != 1:
            raise RequestError("a stream is one choice: n must be 1 here; generate_batch takes any n", param="n")
        token_ids = engine.encode_prompt(prompt)
        engine.check_request(token_ids, params)
        return cls(token_ids, params, engine.tokenizer, engine.max_model_len)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output [P + O]."""
        return self.prompt_ids + self.output_ids

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token_id: int, logprob: TokenLogprob | None = None) -> Delta:
        """Take the next token and say what it adds. The last Delta has a finish_reason and the metrics."""
        assert not self.finished, "a finished sequence takes no more tokens"
        self.output_ids.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        ended = token_id in self.eos_token_ids and not self.params.ignore_eos
        text = "" if ended else self._detokenizer.push(token_id)
        if len(self.output_ids) >= self.params.min_tokens:
            text = self._stop.push(text)
        if self._stop.matched or ended:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.max_tokens:
            self.finish_reason = "length"
        if self.finished and not self._stop.matched:
            text += self._rest()
        return self._delta(text, (token_id,), () if logprob is None else (logprob,))

    def finish_without_output(self) -> Delta:
        """The only Delta of a request for no tokens, which wants its prompt scored."""
        self.finish_reason = "length"
        return self._delta("", (), ())

    def _rest(self) -> str:
        """Text that was held back, at the end. An incomplete character may still complete a stop string."""
        text = self._stop.push(self._detokenizer.flush())
        if self._stop.matched:
            self.finish_reason = "stop"
            return text
        return text + self._stop.flush()

    def _delta(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> Delta:
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None  # told once, with the first
        metrics = self.metrics() if self.finished else None
        return Delta(text, token_ids, logprobs, self.finish_reason, metrics, prompt_logprobs)

    def metrics(self) -> RequestMetrics:
        """What the sequence has cost so far."""
        seconds = time.perf_counter() - self.started_at
        return RequestMetrics(
            input_tokens=len(self.prompt_ids),
            output_tokens=len(self.output_ids),
            throughput=round(len(self.output_ids) / seconds, 3),
        )
