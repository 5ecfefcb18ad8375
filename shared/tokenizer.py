"""Text to token ids and back: a checkpoint's own tokenizer behind the few calls that engines and the server need.

It knows nothing of sampling, streaming or HTTP. Tokenisation itself is the tokenizers library's.

    messages -> apply_chat_template -> text -> encode -> token ids -> decode -> text
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, GenerationConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from shared.errors import RequestError, SetupError, first_line

_CHAR_TO_BYTE = {char: byte for byte, char in bytes_to_unicode().items()}


class Tokenizer:
    """The tokenizer of the checkpoint in `folder`. Calls are safe from several threads.

    vocab_size: ids go from 0 to vocab_size - 1.
    eos_token_ids: tokens that end an answer: the tokenizer's own and those of generation_config.json.

    Raises SetupError if the folder has no usable tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.hf: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # a broken file can fail in any library below
            raise SetupError(f"{folder}: no tokenizer could be loaded: {first_line(error)}") from error
        if not hasattr(self.hf, "backend_tokenizer"):
            raise SetupError(f"{folder}: its tokenizer has no tokenizer.json. Convert it to a fast tokenizer first.")
        vocabulary = self.hf.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.longest_token = max(len(token.encode()) for token in vocabulary)  # bytes; no token stands for more
        self.eos_token_ids = _eos_token_ids(self.hf, folder)
        self.byte_level = "ByteLevel" in repr(self.hf.backend_tokenizer.decoder)
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids [T] of `text`.

        A chat template writes the special tokens itself, so a text that begins with the begin-of-sequence token, as a
        template's may, never gets a second one.
        """
        if self.hf.bos_token and text.startswith(self.hf.bos_token):
            add_special_tokens = False
        return self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the whole sequence, without special tokens. Bytes that are no UTF-8 become U+FFFD."""
        return self.hf.backend_tokenizer.decode(token_ids, skip_special_tokens=True)

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        """The conversation as the model was trained to see it, ready for its answer.

        Raises RequestError if the checkpoint has no template, or the template refuses the conversation.
        """
        if not self.hf.chat_template:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        try:
            return self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refused the messages: {error}", param="messages") from None

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves this token out."""
        token = self.hf.added_tokens_decoder.get(token_id)
        return token is not None and token.special

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes that this one token stands for. A token may be a part of a character, so its text can't be told."""
        token = self.hf.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id in self.hf.added_tokens_decoder:
            return token.encode()
        if self.byte_level:  # GPT-2, section 2.2: each byte is written as one printable character
            return bytes(_CHAR_TO_BYTE[char] for char in token if char in _CHAR_TO_BYTE)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # SentencePiece's byte fallback
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


def _eos_token_ids(hf: Any, folder: Path) -> frozenset[int]:
    ids = {hf.eos_token_id}
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
        ids.update(eos if isinstance(eos, list) else [eos])
    return frozenset(token_id for token_id in ids if token_id is not None)
