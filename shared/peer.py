"""transformers' own generate, with its own cache, as an engine: the peer that our engines are measured against.

It serves benchmarks only and is greedy only. It knows no cache of ours.

    prompts -> left-padded batch -> model.generate -> results with the time of the first token
"""

import threading
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from shared.checkpoint import checkpoint_folder, load_transformers, model_context_length
from shared.config import EngineConfig
from shared.engine import BaseOfflineEngine, Delta, GenerateResult, RequestMetrics, SamplingParams, TokenIds
from shared.errors import UnsupportedParameterError
from shared.tokenizer import Tokenizer


class _Clock(LogitsProcessor):
    """Notes when the logits of the first token are there, and changes nothing."""

    first: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.first = self.first or time.perf_counter()
        return scores


class TransformersPeer(BaseOfflineEngine):
    """Runs static batches through `model.generate`. Raises SetupError if the model can't be loaded."""

    model_id = "transformers"

    def __init__(self) -> None:
        config = EngineConfig()
        folder = checkpoint_folder(config.model)
        self.max_model_len = config.context_length(model_context_length(folder))
        self.tokenizer = Tokenizer(folder)
        self.model = load_transformers(config)

    def stream(
        self,
        prompt: str | TokenIds,
        max_new_tokens: int | None = None,
        params: SamplingParams | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Delta]:
        raise UnsupportedParameterError("the transformers peer doesn't stream: use generate_batch", param="stream")

    def generate_batch(
        self, prompts: Sequence[str | TokenIds], params: SamplingParams | None = None
    ) -> list[GenerateResult]:
        """Greedy, and with `ignore_eos`: what the benchmark measures. Raises UnsupportedParameterError otherwise."""
        params = params or SamplingParams()
        if not params.greedy or not params.ignore_eos or params.n != 1:
            raise UnsupportedParameterError("the transformers peer is greedy, one choice, with ignore_eos", "params")
        encoded = [self.encode_prompt(prompt) for prompt in prompts]
        longest = max(len(token_ids) for token_ids in encoded)
        ids = torch.zeros(len(encoded), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, token_ids in enumerate(encoded):
            ids[row, longest - len(token_ids) :] = torch.tensor(token_ids)
            mask[row, longest - len(token_ids) :] = 1
        clock, began = _Clock(), time.perf_counter()
        output = self.model.generate(  # type: ignore[operator]
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            min_new_tokens=params.max_tokens,
            max_new_tokens=params.max_tokens,
            do_sample=False,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([clock]),
        )[:, longest:].tolist()
        seconds = time.perf_counter() - began
        assert clock.first is not None
        ttft_ms = (clock.first - began) * 1e3
        return [
            GenerateResult(
                self.tokenizer.decode(row),
                row,
                "length",
                RequestMetrics(len(token_ids), len(row), round(len(row) / seconds, 3), round(ttft_ms, 3)),
            )
            for token_ids, row in zip(encoded, output, strict=True)
        ]
