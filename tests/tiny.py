"""Small stand-ins for a real model: a byte tokenizer, a tiny random checkpoint, and a model that says what it is told.

They keep the logic's tests fast and their values workable by hand: a token is a byte, and its id is the byte's value.
"""

import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from shared.blocking import OneAtATime
from shared.engine import BaseOfflineEngine, Delta, SamplingParams, TokenIds
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


def save_tiny_checkpoint(folder: Path, max_position_embeddings: int = 128) -> Path:
    """Two random layers in float32 with grouped heads, and outputs scaled up so that the best token is clearly best."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
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
