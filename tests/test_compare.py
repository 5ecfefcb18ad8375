"""The comparison of all chapters: what counts as good, what is measured again, and what a foreign server gets."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shared import compare as comparison
from shared.chapters import CHAPTERS, ROOT
from shared.compare import (
    LOADS,
    QUICK_TRAFFIC,
    REDUCED,
    TRAFFIC,
    Contestant,
    Loads,
    Measurement,
    contestants,
    main,
    workloads,
)
from shared.errors import SetupError
from shared.goodput import Bounds, attained, goodput, sustained, table
from shared.load_client import Outcome
from shared.report import save, summarise
from shared.workload import WorkloadConfig, closed_mix
from tests.fake_server import DONE, frame, usage
from tests.serving import free_port

BOUNDS = Bounds(1000, 200)
FEW = Loads((1, 2), (20.0, 40.0), 3, 0.1)
TINY = replace(QUICK_TRAFFIC, prompt_tokens=2, output_tokens=4, system_tokens=1, multi_turn=0.0)


def measure(who: Contestant, config: WorkloadConfig, bounds: Bounds, path: Path) -> list[dict]:
    """Make the runs that `path` lacks; all runs."""
    measurement = Measurement(who, config, bounds, path)
    measurement.run()
    return measurement.result["runs"]


def run_at(rate: float, *outcomes: Outcome) -> dict:
    load = {"load": "realistic", "rate": rate}
    return summarise(load, outcomes, seconds=2.0) | {
        "load_name": f"realistic {rate:g}/s",
        "date": "2026-01-01T00:00:00",
    }


GOOD = Outcome(e2e_s=2.9, ttft_s=0.9, completion_tokens=11)  # 200 ms a token
LATE = Outcome(e2e_s=2.0, ttft_s=1.1, completion_tokens=11)
SLOW = Outcome(e2e_s=2.91, ttft_s=0.9, completion_tokens=11)
FAILED = Outcome(e2e_s=0.1, error="HTTP 429")


def test_goodput_by_hand():
    """Both bounds count, a bound that is just met is met, and a request that failed isn't good."""
    run = run_at(1.0, GOOD, LATE, SLOW, FAILED)
    assert attained(run, BOUNDS) == 0.25
    assert goodput(run, BOUNDS) == 0.5


def test_one_token_has_no_time_per_token():
    """It divided by zero."""
    assert attained(run_at(1.0, Outcome(0.5, 0.5, completion_tokens=1)), BOUNDS) == 1


def test_an_answer_without_text_is_not_good():
    """TTFT is unknown then."""
    assert attained(run_at(1.0, Outcome(0.5, None, completion_tokens=3)), BOUNDS) == 0


def test_a_rate_counts_only_if_all_lower_ones_were_sustained():
    """A lucky run at a high rate made up for a bad one at a lower rate."""
    runs = [run_at(4.0, GOOD), run_at(1.0, GOOD), run_at(2.0, LATE)]
    assert sustained({"runs": runs}, BOUNDS)["rate"] == 1.0
    assert sustained({"runs": runs[2:]}, BOUNDS) is None


def test_no_two_loads_share_a_prompt():
    """With the same prompts at each rate, a prefix cache knew the second run beforehand."""
    who = Contestant("x", FEW)
    prompts = [
        {turn.prompt for conversation in load.conversations for turn in conversation.turns}
        for load in workloads(who, TINY)
    ]
    assert len(set().union(*prompts)) == sum(map(len, prompts))


def test_a_higher_rate_gets_more_requests():
    """A rate far beyond what an engine can do passed for sustained, for the queue had no time to build up."""
    low, high = workloads(Contestant("x", Loads((), (1.0, 4.0), 3, 10)), QUICK_TRAFFIC)
    assert (low.requests, high.requests) == (16, 64)  # 1.6 turns a conversation


def test_every_chapter_is_there_in_the_order_of_the_book():
    names = [who.name for who in contestants(quick=True, peers=[("vllm", "http://x/v1")])]
    assert names == [*(path.name.split("_")[0] for path in sorted(ROOT.glob("ch[0-9][0-9]_*"))), "vllm"]


def test_a_foreign_server_is_measured_once(fake, tmp_path, capsys):
    """Started again, the comparison keeps what it has, and sends nothing."""
    who = Contestant("peer", FEW, url=fake.url)
    measure(who, TINY, BOUNDS, tmp_path / "peer.json")
    first = json.loads((tmp_path / "peer.json").read_text())
    assert [run["load_name"] for run in first["runs"]] == [
        "closed 1 at a time", "closed 2 at a time", "realistic 20/s", "realistic 40/s",
    ]  # fmt: skip
    assert all(run["failed"] == 0 and run["requests"] >= 3 for run in first["runs"])
    sent = len(fake.bodies)
    measure(who, TINY, BOUNDS, tmp_path / "peer.json")
    assert len(fake.bodies) == sent
    assert json.loads((tmp_path / "peer.json").read_text()) == first


def answers_at_most(tokens: int):
    return lambda body: [frame("a"), frame("b"), usage(3, min(tokens, body["max_tokens"])), DONE]


@pytest.mark.parametrize("refuses", ["ignore_eos", ""], ids=["refuses", "ignores it silently"])
def test_a_server_without_ignore_eos_is_measured_and_marked(refuses, fake, tmp_path, monkeypatch, capsys):
    """transformers' own server answers 422, and could not be compared. That its answers are shorter has to be said."""
    fake.refuses, fake.script = refuses, answers_at_most(2)
    monkeypatch.setattr(comparison, "contestants", lambda quick, peers: [Contestant("peer", FEW, url=fake.url)])
    monkeypatch.setattr(comparison, "TRAFFIC", TINY)
    for _ in range(2):  # the second time it is read from the file
        comparison.compare(False, [], False, BOUNDS, tmp_path)
        assert "| peer (shorter answers) | closed 2 at a time | 6 | " in (tmp_path / "compare.md").read_text()
    assert ("refuses ignore_eos" in capsys.readouterr().out) == bool(refuses)


def fails_after(fake, answered: int) -> None:
    """The fake server answers so many requests, and then none."""
    whole = fake.script
    out_of_memory = [frame("a"), frame(error={"message": "out of memory"})]
    fake.script = lambda body: whole(body) if len(fake.bodies) <= answered else out_of_memory


def test_a_run_without_an_answer_is_no_run(fake, tmp_path):
    """It counted as finished: the cause was never told, and nothing was tried again."""
    path = tmp_path / "peer.json"
    fails_after(fake, 2)  # the warm-up
    with pytest.raises(SetupError, match=r"closed 1 at a time: no request was answered. 3 failed: .*out of memory"):
        measure(Contestant("peer", FEW, url=fake.url), TINY, BOUNDS, path)
    assert not path.exists()


def test_what_was_measured_before_a_server_failed_is_in_the_table(fake, tmp_path, monkeypatch, capsys):
    """And why some requests of a run failed is told with it."""
    monkeypatch.setattr(comparison, "contestants", lambda quick, peers: [Contestant("peer", FEW, url=fake.url)])
    monkeypatch.setattr(comparison, "TRAFFIC", TINY)
    fails_after(fake, 4)
    with pytest.raises(SystemExit, match="peer: closed 2 at a time: no request was answered"):
        comparison.compare(False, [], False, BOUNDS, tmp_path)
    assert "| peer | closed 1 at a time | 3 (1 failed) | " in (tmp_path / "compare.md").read_text()
    assert "1 failed: error frame: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["[]", "{", "null", '{"name": "peer", "runs": []}'])
def test_a_file_that_makes_no_sense_is_measured_anew(content, fake, tmp_path, capsys):
    """A run stopped while it was written, or a file of an older version, was a traceback."""
    path = tmp_path / "peer.json"
    path.write_text(content)
    assert len(measure(Contestant("peer", FEW, url=fake.url), TINY, BOUNDS, path)) == 4
    assert f"{path} can't be read" in capsys.readouterr().out


def test_a_result_that_cannot_be_written_is_one_line(fake, tmp_path):
    with pytest.raises(SetupError, match=r"peer\.json can't be written: No such file or directory"):
        measure(Contestant("peer", FEW, url=fake.url), TINY, BOUNDS, tmp_path / "gone" / "peer.json")


def test_another_model_behind_the_same_address_is_measured_anew(fake, tmp_path, capsys):
    path = tmp_path / "peer.json"
    who = Contestant("peer", FEW, url=fake.url)
    measure(who, TINY, BOUNDS, path)
    result = json.loads(path.read_text())
    save(result | {"model": "older", "runs": result["runs"][:1]}, path)
    sent = len(fake.bodies)
    assert len(measure(who, TINY, BOUNDS, path)) == 4
    assert len(fake.bodies) == 2 * sent
    assert "measured before with older, it serves fake now" in capsys.readouterr().out


def test_settings_machine_and_code_of_a_kept_run_must_be_the_same(tmp_path, monkeypatch, capsys):
    """A reader who had improved an engine, or taken another model, saw the figures of before."""
    folder, path = tmp_path / "ch01_mine", tmp_path / "mine.json"
    folder.mkdir()
    who = Contestant("mine", Loads((1,), (), 3, 0), folder=folder)
    old = Measurement(who, TINY, BOUNDS, path).result
    old["runs"].append(run_at(1.0, GOOD) | {"load_name": "closed 1 at a time", "requests": 3})
    save(old, path)

    def kept() -> int:
        return len(Measurement(who, TINY, BOUNDS, path).result["runs"])

    assert kept() == 1
    monkeypatch.setenv("DTYPE", "float16")
    assert kept() == 0
    monkeypatch.delenv("DTYPE")
    monkeypatch.setattr(comparison.machine, "processor_name", lambda: "another")
    assert kept() == 0
    monkeypatch.undo()
    (folder / "04_engine.py").write_text("faster = True\n")
    assert kept() == 0
    told = capsys.readouterr().out
    assert all(f"measured before with other {what};" in told for what in ("settings", "machine", "code"))


def test_equal_loads_are_equal_traffic_in_a_reduced_comparison():
    """A reduced chapter's second rate was a full chapter's first, with other prompts."""
    full = {(load.load, load.concurrency, load.rate): load for load in workloads(Contestant("x", LOADS), TRAFFIC)}
    for reduced in REDUCED.values():
        for load in workloads(Contestant("y", reduced), TRAFFIC):
            other = full.get((load.load, load.concurrency, load.rate))
            if other is not None:
                count = min(len(load.conversations), len(other.conversations)) - 1  # the last may be cut short
                assert load.conversations[:count] == other.conversations[:count]


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_closed_mix_keeps_all_its_clients_busy(concurrency):
    """Users who never think, and all there from the first moment."""
    load = closed_mix(replace(TRAFFIC, requests=4), concurrency)
    assert load.requests == max(4, 3 * concurrency)
    assert len(load.conversations) >= concurrency
    assert all(each.arrival_s == 0 and all(turn.think_s == 0 for turn in each.turns) for each in load.conversations)


def test_it_goes_on_where_it_was_stopped(fake, tmp_path):
    """Ctrl-C in the fourth run lost the three before."""
    who, path = Contestant("peer", FEW, url=fake.url), tmp_path / "peer.json"
    measure(who, TINY, BOUNDS, path)
    result = json.loads(path.read_text())
    kept, result["runs"] = result["runs"], result["runs"][:3]
    save(result, path)
    measure(who, TINY, BOUNDS, path)
    again = json.loads(path.read_text())["runs"]
    assert again[:3] == kept[:3]
    assert again[3]["load_name"] == kept[3]["load_name"]


def test_other_traffic_is_measured_anew(fake, tmp_path):
    """Figures of other traffic stood in the same table."""
    path = tmp_path / "peer.json"
    measure(Contestant("peer", FEW, url=fake.url), TINY, BOUNDS, path)
    sent = len(fake.bodies)
    measure(Contestant("peer", FEW, url=fake.url), replace(TINY, output_tokens=5), BOUNDS, path)
    assert len(fake.bodies) >= 2 * sent - 4


def test_more_requests_take_the_place_of_fewer(fake, tmp_path):
    """Both stood in the table, under one name."""
    path = tmp_path / "peer.json"
    measure(Contestant("peer", FEW, url=fake.url), TINY, BOUNDS, path)
    measure(Contestant("peer", replace(FEW, requests=7), url=fake.url), TINY, BOUNDS, path)
    assert [run["requests"] for run in json.loads(path.read_text())["runs"]] == [7, 7, 7, 7]


def test_rates_rise_no_further_than_the_first_that_is_too_much(fake, tmp_path):
    """Each higher rate only made a longer queue, for minutes."""
    path = tmp_path / "peer.json"
    measure(Contestant("peer", FEW, url=fake.url), TINY, Bounds(0, 0), path)
    assert [run["rate"] for run in json.loads(path.read_text())["runs"] if "rate" in run] == [20.0]


def test_chapters_and_a_peer_side_by_side(fake, tmp_path, monkeypatch, capsys, tiny_checkpoint):
    """Real servers of two chapters, each with its own settings, and one of another make; the reader's own settings for
    other chapters stay out of it."""
    monkeypatch.setenv("MODEL", str(tiny_checkpoint))
    monkeypatch.setenv("NUM_BLOCKS", "1")  # would stop chapter 10's server
    old, new = (chapter for chapter in CHAPTERS if chapter.name in ("ch09", "ch10"))
    loads = Loads((2,), (30.0,), 3, 0)
    monkeypatch.setattr(
        comparison, "contestants",
        lambda quick, peers: [
            Contestant(old.name, loads, folder=ROOT / old.folder, settings={"MAX_NUM_SEQS": "4"}),
            Contestant(new.name, loads, True, ROOT / new.folder, {"NUM_BLOCKS": "64"}),
            *(Contestant(label, loads, url=url) for label, url in peers),
        ],
    )  # fmt: skip
    monkeypatch.setattr(comparison, "QUICK_TRAFFIC", TINY)
    comparison.compare(True, [("other", fake.url)], again=False, bounds=BOUNDS, results=tmp_path)
    written = (tmp_path / "compare-quick.md").read_text()
    assert written in capsys.readouterr().out
    for line in ("ch09 | closed 2 at a time", "ch10 (reduced load) | realistic 30/s", "other | closed 2 at a time"):
        assert f"| {line} " in written
    assert f"ch09: MODEL={tiny_checkpoint} MAX_NUM_SEQS=4; ch10 (reduced load): MODEL={tiny_checkpoint} NUM_" in written
    assert "failed" not in written
    assert (tmp_path / "compare-quick.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_that_is_not_there_is_told_and_the_others_stand(fake, tmp_path, monkeypatch):
    """One peer that had been stopped lost the whole table."""
    gone = f"http://127.0.0.1:{free_port()}/v1"
    monkeypatch.setattr(
        comparison, "contestants", lambda quick, peers: [Contestant(label, FEW, url=url) for label, url in peers]
    )
    monkeypatch.setattr(comparison, "TRAFFIC", TINY)
    with pytest.raises(SystemExit, match=r"gone: http.*no model is named there"):
        comparison.compare(False, [("gone", gone), ("there", fake.url)], False, BOUNDS, tmp_path)
    assert "| there | " in (tmp_path / "compare.md").read_text()
    assert "gone" not in (tmp_path / "compare.md").read_text()


@pytest.mark.parametrize(
    "argv",
    [
        ["--peer", "x"],
        ["--peer", "=http://x"],
        ["--peer", "a=x"],
        ["--peer", "../a=http://x"],
        ["--peer", "a|b=http://x"],
        ["--peer", "ch05=http://x"],
        ["--peer", "a=http://x", "--peer", "a=http://y"],
        ["--ttft", "0"],
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert (stopped.value.code, capsys.readouterr().err.count("\n")) == (2, 1)


def test_an_engine_that_sustains_no_rate_says_so(tmp_path: Path):
    run = run_at(0.5, LATE)
    closed = summarise({"load": "closed", "concurrency": 1}, [GOOD], 1.0) | {
        "load_name": "closed 1 at a time",
        "date": "2026",
    }
    machine = {"processor": "x", "cores": 2, "threads": 2, "platform": "x", "python": "3", "torch": "2",
               "transformers": "5"}  # fmt: skip
    result = {"name": "old", "model": "m", "settings": {}, "machine": machine, "runs": [closed, run]}
    assert "| below 0.5 | - |" in table([result], BOUNDS)
    result["runs"][1] = run_at(0.5, GOOD)
    assert "| 0.5, the highest tried | 0.50 |" in table([result], BOUNDS)
    result["runs"].pop()  # stopped before the rates began: it was a traceback, and the table of all was lost
    assert table([result], BOUNDS).count("| - | - |") == 1
