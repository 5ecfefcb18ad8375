"""Deltas and results as the OpenAI API writes them: log-probabilities, streamed chunks, server-sent events.

It knows the shapes of the JSON and the rules of their order; it knows nothing of the transport.

    Generation.deltas() -> chat_chunks | completion_chunks -> event -> b"data: {...}\\n\\n"
"""

import codecs
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from shared.engine import GenerateResult, TokenLogprob
from shared.generation import Generation
from shared.tokenizer import Tokenizer

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def event(data: Json) -> bytes:
    """One server-sent event: `data: `, one line of ASCII JSON, a blank line."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


# --- chat -------------------------------------------------------------------------------------------------------------


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob] | None) -> Json | None:
    """`choice.logprobs` of a chat completion, one entry a token; None where none was asked for."""
    if not entries:
        return None

    def token(token_id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    return {
        "content": [
            token(entry.token_id, entry.logprob) | {"top_logprobs": [token(*pair) for pair in entry.top]}
            for entry in entries
        ]
    }


async def chat_chunks(
    head: Json, generation: Generation, tokenizer: Tokenizer, include_usage: bool
) -> AsyncIterator[Json]:
    """The chunks of a streamed chat completion, in order; `head` is what all of them have in common."""
    nothing_yet = {"usage": None} if include_usage else {}
    waiting: dict[int, list[TokenLogprob]] = {}  # of tokens whose text is still held back

    def chunk(index: int, delta: Json, logprobs: list[TokenLogprob], finish_reason: str | None = None) -> Json:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(tokenizer, logprobs),
            "finish_reason": finish_reason,
        }
        return head | {"choices": [choice]} | nothing_yet

    async for delta in generation.deltas():
        i = delta.index
        if i not in waiting:
            waiting[i] = []
            yield chunk(i, {"role": "assistant", "content": ""}, [])
        waiting[i] += delta.logprobs
        if delta.text:
            yield chunk(i, {"content": delta.text}, waiting[i])
            waiting[i] = []
        if delta.finish_reason is not None:
            yield chunk(i, {}, waiting[i], delta.finish_reason)
    if include_usage:
        yield head | {"choices": [], "usage": generation.usage()}


# --- completions ------------------------------------------------------------------------------------------------------


class CompletionLogprobs:
    """`choice.logprobs` of one text completion, bit by bit: each call goes on where the last one ended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> Json:
        """The prompt's tokens, for echo. The first has no log-probability: nothing precedes it."""
        return self._lists(token_ids, entries)

    def output(self, entries: Sequence[TokenLogprob]) -> Json:
        return self._lists([entry.token_id for entry in entries], entries)

    def _lists(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> Json:
        lists: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            lists["tokens"].append(self._name(token_id))
            lists["token_logprobs"].append(None if entry is None else entry.logprob)
            lists["top_logprobs"].append(None if entry is None else self._top(entry))
            lists["text_offset"].append(self._offset)
            if not self._tokenizer.is_special(token_id):
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return lists

    def _name(self, token_id: int) -> str:
        """The token as text, or as OpenAI writes a part of a character: `bytes:\\xf0\\x9f`."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The most likely tokens and the chosen one. Two tokens that read the same are told apart by their ids."""
        top: dict[str, float] = {}
        for token_id, logprob in {**dict(entry.top), entry.token_id: entry.logprob}.items():
            name = self._name(token_id)
            top[name if name not in top else f"token_id:{token_id}"] = logprob
        return top


def joined_logprobs(parts: Sequence[Json]) -> Json | None:
    """Several parts of a choice's logprobs as one; None if there are none."""
    return {key: [entry for part in parts for entry in part[key]] for key in parts[0]} if parts else None


async def completion_chunks(
    head: Json, generation: Generation, tokenizer: Tokenizer, include_usage: bool, echo: Sequence[str] | None
) -> AsyncIterator[Json]:
    """The chunks of a streamed text completion. `echo`: the text of each prompt, to begin its choices with."""
    nothing_yet = {"usage": None} if include_usage else {}
    logprobs: dict[int, CompletionLogprobs] = {}
    waiting: dict[int, list[Json]] = {}  # of tokens whose text is still held back

    def chunk(index: int, text: str, finish_reason: str | None = None) -> Json:
        parts, waiting[index] = waiting[index], []
        choice = {
            "index": index,
            "text": text,
            "logprobs": joined_logprobs(parts),
            "finish_reason": finish_reason,
        }
        return head | {"choices": [choice]} | nothing_yet

    async for delta in generation.deltas():
        i = delta.index
        text = delta.text
        if i not in waiting:
            waiting[i], logprobs[i] = [], CompletionLogprobs(tokenizer)
            text = (echo[i // generation.n] if echo is not None else "") + text
            if delta.prompt_logprobs is not None:
                waiting[i].append(logprobs[i].prompt(generation.prompts[i // generation.n], delta.prompt_logprobs))
        if delta.logprobs:
            waiting[i].append(logprobs[i].output(delta.logprobs))
        if text:
            yield chunk(i, text)
        if delta.finish_reason is not None:
            yield chunk(i, "", delta.finish_reason)
    if include_usage:
        yield head | {"choices": [], "usage": generation.usage()}


def completion_choice(
    index: int, result: GenerateResult, tokenizer: Tokenizer, prompt_ids: Sequence[int], echo: str | None
) -> Json:
    """One choice of a text completion that isn't streamed."""
    lists, parts = CompletionLogprobs(tokenizer), []
    if result.prompt_logprobs is not None:
        parts.append(lists.prompt(prompt_ids, result.prompt_logprobs))
    if result.logprobs is not None:
        parts.append(lists.output(result.logprobs))
    return {
        "index": index,
        "text": (echo or "") + result.text,
        "logprobs": joined_logprobs(parts),
        "finish_reason": result.finish_reason,
    }
