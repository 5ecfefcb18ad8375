"""Chapter 1's server, in one file to read first: a blocking engine, and the app that serves it.

The class is the one of 04_engine.py, word for word. Run it from inside this folder:

    uvicorn 05_server:app --port 8001
"""

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shared.blocking import OneAtATime, interruptible
from shared.checkpoint import checkpoint_folder, load_transformers, model_context_length, model_id
from shared.config import EngineConfig
from shared.engine import BaseOfflineEngine, Delta, Message, SamplingParams, TokenIds
from shared.sampler import sample, token_logprobs
from shared.sequence import Sequence as GeneratedSequence
from shared.server import make_app
from shared.tokenizer import Tokenizer


class BaselineEngine(BaseOfflineEngine):
    """A stateless single-turn responder: the reference for all chapters.

    Raises SetupError, one line, if the model or a setting can't be used.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        folder = checkpoint_folder(config.model)
        self.model_id = model_id(config.model)
        self.max_model_len = config.context_length(model_context_length(folder))
        self.tokenizer = Tokenizer(folder)
        self.model = load_transformers(config)
        self._one_at_a_time = OneAtATime()
        config.announce(self.max_model_len)

    def build_prompt(self, messages: Sequence[Message]) -> str:
        """The last message alone, in the model's chat template: this engine remembers nothing of a conversation."""
        return super().build_prompt(messages[-1:])

    def stream(
        self,
        prompt: str | TokenIds,
        max_new_tokens: int | None = None,
        params: SamplingParams | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Delta]:
        with self._one_at_a_time, interruptible(self.model, cancel):
            seq = GeneratedSequence.for_request(self, prompt, max_new_tokens, params)
            if seq.params.prompt_logprobs is not None:
                logits = self.forward(seq.prompt_ids, every_position=True)  # [T, V]
                scored = token_logprobs(logits[:-1], seq.prompt_ids[1:], seq.params.prompt_logprobs)
                seq.prompt_logprobs = (None, *scored)
            if seq.max_tokens == 0:
                yield seq.finish_without_output()
            while not seq.finished:
                logits = self.forward(seq.token_ids)  # [1, V]
                [(token_id, logprob)] = sample(logits, [seq])
                yield seq.append(token_id, logprob)

    @torch.inference_mode()
    def forward(self, token_ids: TokenIds, every_position: bool = False) -> Tensor:
        """Logits [1, V] of the token after `token_ids` [T], or those after each of its positions [T, V]."""
        ids = torch.tensor([token_ids], device=self.model.device)  # [1, T]
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=0 if every_position else 1).logits[0]


engine = BaselineEngine()
app = make_app(engine)
