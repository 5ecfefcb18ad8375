"""From text to tokens and back: what a language model reads and writes.

A model sees no letters. Text becomes bytes, bytes become tokens from a fixed vocabulary, and the model is given their
numbers. This script needs the tokenizer only, not the model.

    python 01_tokens.py: text -> bytes -> token ids -> text
"""

from shared.checkpoint import checkpoint_folder
from shared.config import EngineConfig
from shared.detokenizer import Detokenizer
from shared.engine import Message
from shared.tokenizer import Tokenizer


def main() -> None:
    tokenizer = Tokenizer(checkpoint_folder(EngineConfig().model))
    print(f"The vocabulary has {tokenizer.vocab_size} tokens.\n")
    show_pieces(tokenizer)
    show_characters(tokenizer)
    show_chat_template(tokenizer)


def show_pieces(tokenizer: Tokenizer) -> None:
    """How texts are cut up: frequent words are one token, rare ones several, digits stand alone."""
    print("1. Text -> tokens. The bar | is where one token ends; a space belongs to the word after it.")
    print("   How many tokens will the longest word below be?\n")
    for text in ("The capital of France is Paris.", "antidisestablishmentarianism", "In 2024, 3.14", "  indented"):
        token_ids = tokenizer.encode(text)
        pieces = "|".join(tokenizer.decode([token_id]) for token_id in token_ids)
        print(f"   {pieces}\n   {token_ids}\n   {len(text)} characters, {len(token_ids)} tokens\n")


def show_characters(tokenizer: Tokenizer) -> None:
    """Tokens are strings of bytes, so a character may be spread over several of them."""
    text = "naïve 😀"
    token_ids = tokenizer.encode(text)
    print(f"2. Tokens -> text. {text!r} in UTF-8 is {text.encode().hex(' ')}\n")
    detokenizer = Detokenizer(tokenizer)
    print("        token  its bytes      decoded alone   what a stream may send")
    for token_id in token_ids:
        alone, sent = tokenizer.decode([token_id]), detokenizer.push(token_id)
        print(f"   {token_id:>10}  {tokenizer.token_bytes(token_id).hex(' '):<13}  {alone!r:<14}  {sent!r}")
    print("\n   Decoded alone, the parts of the emoji are no characters, and U+FFFD stands in for each.")
    print("   A server that streams must wait until a character is complete.\n")


def show_chat_template(tokenizer: Tokenizer) -> None:
    """A conversation is one text too: the chat template marks who speaks, with special tokens."""
    messages = [Message(role="user", content="Hello")]
    prompt = tokenizer.apply_chat_template([message.for_template() for message in messages])
    token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    print("3. A chat is a text with special tokens, ready for the assistant's words:\n")
    print("   " + prompt.replace("\n", "\n   ") + "<- the model goes on here\n")
    print(f"   {len(token_ids)} tokens: {token_ids}")
    special = sorted({token_id for token_id in token_ids if tokenizer.is_special(token_id)})
    names = ", ".join(f"{token_id} {tokenizer.token_bytes(token_id).decode()}" for token_id in special)
    print(f"   Special ones among them: {names}. `decode` leaves them out, and the answer")
    print(f"   ends when the model itself writes an end-of-sequence token, here {sorted(tokenizer.eos_token_ids)}.")
    print("   A user who types <|im_end|> types the special token too: most engines let that pass, and so do these.")


if __name__ == "__main__":
    main()
