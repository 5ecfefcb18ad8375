"""Small stand-ins for a real model: a byte tokenizer, a tiny random checkpoint, and engines that follow a script.

They keep the logic's tests fast and their values workable by hand: a token is a byte, and its id is the byte's value.
"""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from shared.blocking import OneAtATime
from shared.engine import (
    BaseOfflineEngine,
    BaseOnlineEngine,
    Delta,
    DeltaStream,
    EngineDeadError,
    EngineStats,
    QueueFullError,
    RequestFailedError,
    SamplingParams,
    TokenIds,
)
from shared.sampler import sample, token_logprobs
from shared.sequence import Sequence
from shared.tokenizer import Tokenizer

IM_START, IM_END = 256, 257  # the special tokens; IM_END ends an answer
VOCAB_SIZE = 258
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + ':' + m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def save_byte_tokenizer(folder: Path) -> None:
    """A tokenizer whose ids 0 to 255 are the bytes."""
    raw = RawTokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def save_tiny_checkpoint(folder: Path, max_position_embeddings: int = 128, kv_heads: int = 2) -> Path:
    """Two random layers in float32 with grouped heads, and outputs scaled up so that the best token is clearly best."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16 * kv_heads,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.3,
        bos_token_id=IM_START,
        eos_token_id=IM_END,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def greedy_by_transformers(engine: BaseOfflineEngine, token_ids: list[int], max_new_tokens: int) -> list[int]:
    """What transformers itself generates with the model of chapter 1's engine, greedily and with its own cache."""
    output = engine.model.generate(  # type: ignore[attr-defined]
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(engine.tokenizer.eos_token_ids),
        pad_token_id=0,
    )
    return output[0, len(token_ids) :].tolist()


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        save_byte_tokenizer(Path(folder))
        return Tokenizer(Path(folder))


class ScriptedEngine(BaseOfflineEngine):
    """A blocking engine whose model always goes on with the next byte of a script, then ends.

    Its logits give the scripted token 10 and all others 0. If `gate` is set, each token waits for one `release` of it.
    `fail_at`: the output token at which it raises. Counts what it was asked to compute.
    """

    model_id = "scripted"

    def __init__(self, script: bytes | str = b"", max_model_len: int = 1000) -> None:
        self.tokenizer = byte_tokenizer()
        self._running = 0
        self._one_at_a_time = OneAtATime()
        self.reset(script, max_model_len)

    def reset(self, script: bytes | str = b"", max_model_len: int = 1000) -> None:
        """Forget the counts and take a new script."""
        self.script = script.encode() if isinstance(script, str) else script
        self.max_model_len = max_model_len
        self.gate: threading.Semaphore | None = None
        self.fail_at: int | None = None
        self.steps = 0
        self.most_at_once = 0
        self.prompts: list[list[int]] = []
        self.seeds: list[int | None] = []

    def logits(self, position: int) -> torch.Tensor:
        """[1, V] for the output token at `position`."""
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, self.script[position] if position < len(self.script) else IM_END] = 10.0
        return logits

    def stream(
        self,
        prompt: str | TokenIds,
        max_new_tokens: int | None = None,
        params: SamplingParams | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Delta]:
        with self._one_at_a_time:
            seq = Sequence.for_request(self, prompt, max_new_tokens, params)
            self.prompts.append(seq.prompt_ids)
            self.seeds.append(seq.params.seed)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            try:
                if seq.params.prompt_logprobs is not None:
                    flat = torch.zeros(len(seq.prompt_ids) - 1, VOCAB_SIZE)
                    scored = token_logprobs(flat, seq.prompt_ids[1:], seq.params.prompt_logprobs)
                    seq.prompt_logprobs = (None, *scored)
                if seq.max_tokens == 0:
                    yield seq.finish_without_output()
                while not seq.finished:
                    while self.gate is not None and not self.gate.acquire(timeout=0.02):
                        if cancel is not None and cancel.is_set():
                            return
                    if cancel is not None and cancel.is_set():
                        return
                    if self.fail_at == len(seq.output_ids):
                        raise RuntimeError("scripted failure with a secret")
                    self.steps += 1
                    [(token_id, logprob)] = sample(self.logits(len(seq.output_ids)), [seq])
                    yield seq.append(token_id, logprob)
            finally:
                self._running -= 1


class FakeOnlineEngine(ScriptedEngine, BaseOnlineEngine):
    """An online engine in miniature: every request is a task on the event loop, so all of them run at once.

    `gate` and `fail_at` are as in ScriptedEngine. At most `max_running` run; up to `max_waiting` more wait.
    """

    model_id = "online"

    def __init__(self, script: bytes | str = b"", max_running: int = 4, max_waiting: int = 2) -> None:
        super().__init__(script)
        self.max_waiting = max_waiting
        self.aborted: list[str] = []
        self.max_running = max_running
        self._tasks: dict[str, tuple[asyncio.Task[None], DeltaStream]] = {}  # oldest first
        self._error: str | None = "the engine hasn't started"

    async def start(self) -> None:
        self._error = None

    def submit(self, request_id: str, token_ids: TokenIds, params: SamplingParams) -> DeltaStream:
        if self._error is not None:
            raise EngineDeadError(self._error)
        self.check_request(token_ids, params)
        if len(self._tasks) >= self.max_running + self.max_waiting:
            raise QueueFullError("the queue is full")
        deltas = DeltaStream()
        self._tasks[request_id] = asyncio.create_task(self._run(request_id, list(token_ids), params, deltas)), deltas
        return deltas

    async def _run(self, request_id: str, token_ids: list[int], params: SamplingParams, deltas: DeltaStream) -> None:
        try:
            while request_id not in list(self._tasks)[: self.max_running]:
                await asyncio.sleep(0.005)
            sequences = [Sequence(token_ids, params.for_choice(k), self.tokenizer, 1000) for k in range(params.n)]
            while not all(seq.finished for seq in sequences):
                while self.gate is not None and not self.gate.acquire(blocking=False):
                    await asyncio.sleep(0.005)
                for k, seq in enumerate(sequences):
                    if self.fail_at == len(seq.output_ids):
                        raise RequestFailedError("the request failed, as scripted")
                    [(token_id, logprob)] = sample(self.logits(len(seq.output_ids)), [seq])
                    deltas.put(replace(seq.append(token_id, logprob), index=k))
                await asyncio.sleep(0)
        except RequestFailedError as error:
            deltas.put(error)
        finally:
            deltas.put(None)
            self._tasks.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        task, _ = self._tasks.pop(request_id, (None, None))
        if task is not None:
            self.aborted.append(request_id)
            task.cancel()

    def die(self) -> None:
        """What a loop that dies does: every request ends with an error at once."""
        self._error = "the engine's loop has died"
        for _, deltas in list(self._tasks.values()):
            deltas.put(EngineDeadError(self._error))

    def stats(self) -> EngineStats:
        running = min(len(self._tasks), self.max_running)
        return EngineStats(running, len(self._tasks) - running, kv_blocks_used=3, kv_blocks_total=8, preemptions=0)

    def error(self) -> str | None:
        return self._error

    async def shutdown(self) -> None:
        self.die()
