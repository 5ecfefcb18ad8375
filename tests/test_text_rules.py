"""Detokeniser and stop strings: what text comes out of which tokens, worked out by hand on a byte tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.detokenizer import Detokenizer, StopMatcher
from shared.engine import GenerateResult, SamplingParams
from shared.sequence import Sequence
from tests.tiny import IM_END, ScriptedEngine, byte_tokenizer


def run(script: bytes | str, **params: object) -> tuple[list[str], GenerateResult]:
    """The texts of the deltas, and the whole result, of a model that says `script`."""
    engine = ScriptedEngine(script)
    deltas = list(engine.stream("p", params=SamplingParams(**params)))
    return [delta.text for delta in deltas], GenerateResult.from_deltas(deltas)


def test_an_incomplete_character_is_held_back():
    """Sending each token's own text puts U+FFFD into every emoji."""
    texts, result = run("hi 😀é")
    assert texts == ["h", "i", " ", "", "", "", "😀", "", "é", ""]
    assert result.text == "hi 😀é"
    assert result.finish_reason == "stop"


def test_a_character_cut_off_at_the_limit_is_one_replacement_character():
    """Dropping it would make the text shorter than its tokens; sending it early would change it later."""
    texts, result = run("hi 😀é", max_tokens=5)
    assert texts == ["h", "i", " ", "", "\ufffd"]
    assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["DEF"], "ABC", "stop"),
        (["CX"], "ABCDEFG", "stop"),  # held back at C, let go at D
        (["BCD", "ABC"], "", "stop"),  # ABC is complete first
        (["G"], "ABCDEF", "stop"),
        (["GH"], "ABCDEFG", "stop"),  # held back at the end of the sequence
        (["FGX", "CDE"], "AB", "stop"),
        ("DE", "ABC", "stop"),
        (["", "F"], "ABCDE", "stop"),
        ([], "ABCDEFG", "stop"),
    ],
)
def test_stop_strings(stop: list[str] | str, text: str, reason: str):
    """A stop string that spans tokens must not leak its beginning, and a near miss must not lose text."""
    texts, result = run("ABCDEFG", stop=stop)
    assert (result.text, result.finish_reason) == (text, reason)
    assert "".join(texts) == text


def test_a_near_miss_that_begins_a_real_match_is_found():
    """A matcher that starts over after a mismatch misses AAB in AAAB."""
    assert run("xAAAB!", stop=["AAB"])[1].text == "xA"


def test_text_held_back_at_the_limit_is_flushed():
    texts, result = run("ABCDEFG", stop=["CDX"], max_tokens=4)
    assert (result.text, result.finish_reason) == ("ABCD", "length")
    assert texts == ["A", "B", "", "CD"]


def test_a_stop_string_inside_a_character_boundary():
    """The match must be looked for in characters, not in bytes or tokens."""
    assert run("aé😀b", stop=["😀"])[1].text == "aé"


def test_a_stop_string_completed_by_the_last_flush_still_stops():
    _, result = run(b"ab\xf0\x9f", max_tokens=4, stop=["\ufffd"])
    assert (result.text, result.finish_reason) == ("ab", "stop")


def test_min_tokens_puts_off_stop_strings_and_the_end():
    """min_tokens that only masks the end-of-sequence token lets a stop string end the text too early."""
    assert run("ABCABC", stop=["B"], min_tokens=3)[1].text == "ABCA"
    assert len(run("AB", min_tokens=5, max_tokens=8)[1].token_ids) >= 5


def test_ignore_eos_gives_exactly_max_tokens():
    """Load tools count on it: one token fewer and their throughput is wrong."""
    _, result = run("AB", ignore_eos=True, max_tokens=7)
    assert len(result.token_ids) == result.metrics.output_tokens == 7
    assert (result.text, result.finish_reason) == ("AB", "length")
    assert result.token_ids[2:] == [IM_END] * 5


def test_the_end_of_the_context_is_the_limit():
    engine = ScriptedEngine("ABCDEFG", max_model_len=6)
    result = engine.generate("pp", 100)
    assert (result.text, result.finish_reason) == ("ABCD", "length")


def test_the_end_token_is_counted_but_not_shown():
    _, result = run("AB")
    assert result.token_ids == [65, 66, IM_END]
    assert result.text == "AB"


@given(st.binary(max_size=60))
def test_pieces_join_to_the_text_of_the_whole(data: bytes):
    """Whatever the bytes, invalid ones included, streaming gives the text that decoding at once gives."""
    detokenizer = Detokenizer(byte_tokenizer())
    text = "".join([detokenizer.push(byte) for byte in data]) + detokenizer.flush()
    assert text == byte_tokenizer().decode(list(data)) == data.decode(errors="replace")


@given(st.text(st.sampled_from("abc"), max_size=30), st.lists(st.text(st.sampled_from("abc"), min_size=1), max_size=4))
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text: str, stop: list[str]):
    """Character by character, in one piece, or in threes: the same text, up to the stop string complete first."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    expected = text[: min(ends)[1]] if ends else text
    for size in (1, 3, max(1, len(text))):
        matcher, out = StopMatcher(stop), ""
        for start in range(0, len(text), size):
            out += matcher.push(text[start : start + size])
            if matcher.matched:
                break
        out += matcher.flush()
        assert out == expected
        assert matcher.matched == bool(ends)


def test_the_window_of_the_detokeniser_does_not_grow():
    """Decoding the whole sequence for each token costs more and more: 8,000 tokens would take minutes."""
    tokenizer, longest = byte_tokenizer(), 0

    class Spy:
        def decode(self, token_ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return tokenizer.decode(token_ids)

    detokenizer = Detokenizer(Spy())  # type: ignore[arg-type]
    for byte in "héllo wörld ".encode() * 50:
        detokenizer.push(byte)
    assert longest < 10


def test_a_finished_sequence_takes_no_more_tokens():
    seq = Sequence([1], SamplingParams(max_tokens=1), byte_tokenizer(), 100)
    seq.append(65)
    with pytest.raises(AssertionError, match="finished"):
        seq.append(66)
