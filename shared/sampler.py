"""Logits to the next token of each sequence in a batch, each row by its own parameters and its own random numbers.

It knows sequences and their sampling parameters; nothing of models, caches or text.

    logits [B, V] -> penalties -> temperature -> softmax -> top-k -> top-p -> min-p -> draw -> B tokens
"""

import math
from collections.abc import Sequence as Rows

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.engine import RequestFailedError, SamplingParams, TokenLogprob
from shared.sequence import Sequence

LOGPROB_ROWS = 256  # rows of log-softmax at a time: a long prompt's rows times the vocabulary would fill the memory
BLOCK = 256  # of the vocabulary, in the search for the most likely token


@torch.inference_mode()
def sample(logits: Tensor, sequences: Rows[Sequence]) -> list[tuple[int, TokenLogprob | None]]:
    """Choose the next token of each sequence.

    logits: [B, V], row i for sequences[i]; any float dtype, left unchanged.
    Returns for each row the token id and, where asked for, its log-probability under the unscaled logits.

    A row's token depends on its own logits, parameters and generator alone, never on the other rows.
    Raises RequestFailedError if a row has NaN in it.
    """
    raw = logits.float()
    scores = _penalised(raw, sequences)
    tokens = _most_likely(scores)
    # Rows that need their candidates in order are drawn apart from the others: sorting is the dear part.
    for ordered in (False, True):
        rows = [
            row
            for row, seq in enumerate(sequences)
            if not seq.params.greedy and _needs_order(seq.params, scores.shape[1]) == ordered
        ]
        if rows:
            drawn = _draw(scores[rows], [sequences[row] for row in rows], ordered)
            for row, token in zip(rows, drawn, strict=True):
                tokens[row] = token
    logprobs: list[TokenLogprob | None] = [None] * len(tokens)
    for row, seq in enumerate(sequences):
        if seq.params.logprobs is not None:
            logprobs[row] = token_logprobs(raw[row : row + 1], [tokens[row]], seq.params.logprobs)[0]
    return list(zip(tokens, logprobs, strict=True))


def _most_likely(scores: Tensor) -> list[int]:
    """The token with the largest of scores [B, V] in each row. Raises RequestFailedError if there is NaN in any.

    torch's argmax compares one number after the other, its amax several at once: so the largest of each block first,
    then the block, then the place in it.
    """
    if rest := -scores.shape[1] % BLOCK:
        scores = F.pad(scores, (0, rest), value=-math.inf)
    blocks = scores.unflatten(1, (-1, BLOCK))  # [B, V/256, 256]
    largest, block = blocks.amax(dim=-1).max(dim=-1)
    if largest.isnan().any():  # NaN is greater than anything to both
        raise RequestFailedError("the model's logits are not numbers (NaN)")
    place = blocks[torch.arange(len(blocks), device=block.device), block].argmax(dim=-1)
    return (block * BLOCK + place).tolist()


@torch.inference_mode()
def token_logprobs(logits: Tensor, token_ids: Rows[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of `token_ids` [R] under `logits` [R, V], with the `top` most likely tokens of each row."""
    entries = []
    for start in range(0, len(token_ids), LOGPROB_ROWS):
        chosen = torch.tensor(token_ids[start : start + LOGPROB_ROWS], device=logits.device)
        logprobs = logits[start : start + LOGPROB_ROWS].float().log_softmax(dim=-1)  # [r, V]
        logprobs.clamp_(min=-9999.0)  # JSON has no infinity
        own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        values, indices = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
        for token_id, logprob, ids, lps in zip(chosen.tolist(), own, indices.tolist(), values.tolist(), strict=True):
            entries.append(TokenLogprob(token_id, logprob, tuple(zip(ids, lps, strict=True))))
    return entries


def _needs_order(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1


def _penalised(raw: Tensor, sequences: Rows[Sequence]) -> Tensor:
    """[B, V] with each row's penalties; the same tensor where no row has any."""
    scores = raw
    for row, seq in enumerate(sequences):
        p = seq.params
        penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
        too_short = len(seq.output_ids) < p.min_tokens and not p.ignore_eos
        if not penalties and not too_short:
            continue
        if scores is raw:
            scores = raw.clone()
        if penalties:
            _penalise(scores[row], seq)
        if too_short:
            scores[row, sorted(seq.eos_token_ids)] = -math.inf
    return scores


def _penalise(scores: Tensor, seq: Sequence) -> None:
    """Lower the scores [V] of tokens seen before, in place."""
    p = seq.params
    if p.repetition_penalty != 1:  # CTRL (arXiv:1909.05858), section 4.1, with the sign minded
        seen = torch.tensor(sorted(set(seq.token_ids)), device=scores.device)
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if seq.output_ids and (p.presence_penalty or p.frequency_penalty):  # OpenAI's: of the generated tokens alone
        ids, counts = torch.tensor(seq.output_ids, device=scores.device).unique(return_counts=True)
        scores[ids] -= p.presence_penalty + p.frequency_penalty * counts


def _draw(scores: Tensor, sequences: Rows[Sequence], ordered: bool) -> list[int]:
    """Draw one token for each row of scores [R, V]."""
    params = [seq.params for seq in sequences]
    temperature = torch.tensor([p.temperature for p in params], device=scores.device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=scores.device)[:, None]
    # Largest first subtracted, so that a low temperature can't overflow.
    probs = ((scores - scores.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)  # [R, V]
    token_ids = None
    if ordered:
        probs, token_ids = probs.sort(dim=-1, descending=True, stable=True)
        probs = _nucleus(probs, params)
    probs = torch.where(probs >= min_p * probs.amax(dim=-1, keepdim=True), probs, 0.0)
    # Inverse transform sampling: one uniform number a row, and the first token whose cumulated weight exceeds it.
    cumulated = probs.double().cumsum(dim=-1)
    total = cumulated[:, -1:].contiguous()
    uniform = torch.stack([torch.rand(1, generator=seq.generator, dtype=torch.float64) for seq in sequences])
    place = torch.searchsorted(cumulated, uniform.to(scores.device) * total, right=True)
    place = torch.minimum(place, torch.searchsorted(cumulated, total))  # never past the last candidate
    if token_ids is not None:
        place = token_ids.gather(1, place)
    return place[:, 0].tolist()


def _nucleus(probs: Tensor, params: Rows[SamplingParams]) -> Tensor:
    """Zero what top-k and then top-p (arXiv:1904.09751) leave out of probs [R, V], sorted downwards. Row 0 stays."""
    V = probs.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < V else V for p in params], device=probs.device)[:, None]
    top_p = torch.tensor([p.top_p if p.top_p < 1 else math.inf for p in params], dtype=torch.float64)[:, None]
    probs = torch.where(torch.arange(V, device=probs.device) < top_k, probs, 0.0)
    ahead = probs.double().cumsum(dim=-1) - probs  # the weight of all likelier tokens
    return torch.where(ahead < top_p.to(probs.device) * probs.sum(dim=-1, keepdim=True), probs, 0.0)
