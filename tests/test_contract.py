"""The contract: parameters that check themselves, results, settings, scripts that load, imports that go one way."""

import ast
import re
import sys

import pytest
from pydantic import ValidationError

from shared.config import EngineConfig
from shared.engine import (
    ContextLengthError,
    Delta,
    GenerateResult,
    Message,
    RequestError,
    RequestMetrics,
    SamplingParams,
    SetupError,
    UnsupportedParameterError,
)
from shared.loader import load_script
from tests.serving import ROOT
from tests.tiny import ScriptedEngine


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 1.1),
        ("top_p", float("inf")),
        ("top_k", -2),
        ("min_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("n", 0),
        ("n", 9),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("stop", [1]),
    ],
)
def test_sampling_params_refuse_what_is_out_of_range(name: str, value: object):
    with pytest.raises(ValidationError, match=name):
        SamplingParams(**{name: value})


def test_sampling_params_refuse_more_min_tokens_than_max_tokens():
    with pytest.raises(ValidationError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_choices_use_the_seeds_that_follow():
    assert SamplingParams(n=3, seed=5).for_choice(2) == SamplingParams(n=1, seed=7)
    assert SamplingParams(n=3).for_choice(2).seed is None


def test_metrics_leave_out_what_the_engine_does_not_know():
    assert RequestMetrics(3, 4, 1.5).as_dict() == {"input_tokens": 3, "output_tokens": 4, "throughput": 1.5}
    assert RequestMetrics(3, 4, 1.5, ttft_ms=0.0).as_dict()["ttft_ms"] == 0.0


def test_a_result_is_its_deltas_joined():
    deltas = [
        Delta("a", (1,)),
        Delta("", (2,)),
        Delta("bc", (3, 4), finish_reason="length", metrics=RequestMetrics(1, 4, 1.0)),
    ]
    result = GenerateResult.from_deltas(deltas)
    assert (result.text, result.token_ids, result.finish_reason) == ("abc", [1, 2, 3, 4], "length")


def test_batches_give_n_choices_a_prompt_in_order():
    engine = ScriptedEngine("ab")
    results = engine.generate_batch(["x", [65]], SamplingParams(n=2, seed=1, temperature=1.0))
    assert [result.text for result in results] == ["ab"] * 4
    assert engine.prompts == [[120], [120], [65], [65]]
    assert engine.seeds == [1, 2, 1, 2]


def test_a_bad_prompt_in_a_batch_stops_it_before_any_is_run():
    engine = ScriptedEngine("ab")
    with pytest.raises(RequestError, match="empty"):
        engine.generate_batch(["x", ""])
    assert engine.steps == 0


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", "empty"),
        ([], "empty"),
        ([258], "token id 258 is out of the vocabulary: ids go from 0 to 257"),
        ([-1], "token id -1"),
    ],
)
def test_a_prompt_that_can_not_be_run_is_refused(prompt: str | list[int], error: str):
    with pytest.raises(RequestError, match=error):
        ScriptedEngine("ab").generate(prompt)


def test_a_prompt_that_fills_the_context_is_refused_unless_it_is_only_scored():
    engine = ScriptedEngine("ab", max_model_len=4)
    with pytest.raises(ContextLengthError, match=r"maximum context length is 4 tokens.*requested 5 tokens"):
        engine.generate("pppp", 1)
    assert engine.generate("pppp", 0, SamplingParams(prompt_logprobs=0)).token_ids == []


def test_a_stream_is_one_choice():
    """n silently ignored would give one choice where two were asked for."""
    with pytest.raises(RequestError, match="n must be 1"):
        ScriptedEngine("ab").generate("p", params=SamplingParams(n=2))


def test_messages_join_their_text_parts_and_refuse_others():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert Message(role="user", content=parts).text == "one two"
    assert Message(role="assistant").text == ""
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(UnsupportedParameterError, match="image_url"):
        _ = Message(role="user", content=image).text


def test_developer_is_the_template_s_system():
    assert Message(role="developer", content="x").for_template() == {"role": "system", "content": "x"}


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "mend"),
    [
        ("MAX_MODEL_LEN", "abc", "MAX_MODEL_LEN=abc: .*unset MAX_MODEL_LEN"),
        ("MAX_MODEL_LEN", "1", "MAX_MODEL_LEN=1: "),
        ("DTYPE", "int3", "DTYPE=int3: .*float32"),
    ],
)
def test_a_wrong_variable_is_one_line_with_its_mend(monkeypatch, variable: str, value: str, mend: str):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SetupError, match=mend) as caught:
        EngineConfig()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta:x"])
def test_a_device_that_is_not_there_is_one_line(device: str):
    with pytest.raises(SetupError, match=f"DEVICE={device}"):
        EngineConfig(device=device).torch_device()


def test_an_empty_variable_is_as_if_unset(monkeypatch):
    monkeypatch.setenv("MAX_MODEL_LEN", "")
    assert EngineConfig().max_model_len is None


def test_a_context_longer_than_the_model_s_is_refused_with_both_numbers():
    with pytest.raises(SetupError, match=r"MAX_MODEL_LEN=300.*256"):
        EngineConfig(max_model_len=300).context_length(256)
    assert EngineConfig(max_model_len=200).context_length(256) == 200
    assert EngineConfig().context_length(256) == 256


def test_a_variable_of_a_later_chapter_is_noticed(monkeypatch, capsys):
    """QUANT=int8 in front of chapter 1 would otherwise look as if it worked."""
    monkeypatch.setenv("QUANT", "int8")
    EngineConfig().announce(128)
    assert "QUANT has no effect here: it begins with ch11" in capsys.readouterr().err


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_scripts_of_the_same_name_in_two_folders_are_two_modules(tmp_path):
    """A dataclass with postponed annotations looks its module up in sys.modules while it is being defined."""
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = {}\n"
    )
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "04_engine.py").write_text(source.format(value))
    first, second = (load_script(tmp_path / folder / "04_engine.py") for folder in ("one", "two"))
    assert (first.A().x, second.A().x) == (1, 2)
    assert load_script(tmp_path / "one" / "04_engine.py") is first


def test_a_script_that_fails_is_not_left_half_loaded(tmp_path):
    (tmp_path / "05_server.py").write_text("raise ValueError('no')")
    with pytest.raises(ValueError, match="no"):
        load_script(tmp_path / "05_server.py")
    assert not [name for name in sys.modules if name.endswith(f"{tmp_path.name}.05_server")]


def test_a_script_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="99_nothing"):
        load_script(tmp_path / "99_nothing.py")


def test_chapter_1_shows_the_engine_it_has():
    """05_server.py is read alone and repeats the class: it must be the same, to the last statement."""

    def engine_class(name: str) -> str:
        tree = ast.parse((ROOT / "ch01_baseline" / name).read_text())
        [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "BaselineEngine"]
        return ast.dump(found)

    assert engine_class("05_server.py") == engine_class("04_engine.py")


@pytest.mark.parametrize("path", sorted(ROOT.glob("ch*/05_server.py")), ids=lambda path: path.parent.name)
def test_every_server_ends_in_its_two_lines(path):
    engine, app = path.read_text().rstrip().splitlines()[-2:]
    assert engine.startswith("engine = ")
    assert app == "app = make_app(engine)"


@pytest.mark.parametrize("path", sorted(ROOT.glob("shared/*.py")), ids=lambda path: path.name)
def test_shared_imports_no_chapter(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if re.match(r"ch\d\d", name)], f"{path.name} imports a chapter"
