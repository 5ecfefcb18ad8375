"""Several ranks: real processes that talk through gloo, not one token that differs, and what happens if one dies."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import requests
import torch

from ch01_baseline.engine import BaselineEngine
from ch11_quant_tp.engine import Engine, FullConfig
from ch11_quant_tp.tensor_parallel import Shard, share
from shared.config import EngineConfig
from shared.engine import EngineDeadError, SamplingParams, SetupError
from shared.model import ModelConfig, load_model
from shared.server_process import free_port
from tests.serving import ROOT, serve_chapter, wait_until
from tests.stepped import new_engine
from tests.test_model import CHECKPOINTS, our_logits, save_checkpoint
from tests.tiny import save_tiny_checkpoint

TEXT = "The quick brown fox jumps over the lazy dog, twice."
PROMPTS = [TEXT[:n] for n in (1, 3, 5, 9, 17, 33)] + [TEXT[:17] + "!"]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def three_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 KV heads, as the real model has."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("three") / "tiny", kv_heads=3)


@pytest.fixture(scope="module")
def baseline(three_heads) -> BaselineEngine:
    return BaselineEngine(EngineConfig(model=str(three_heads)))


@pytest.fixture(scope="class", params=[1, 2, 3])
def engine(request: pytest.FixtureRequest, three_heads) -> Iterator[Engine]:
    """With chunks, a prefix cache, and a pool so small that sequences are preempted."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, "num_blocks": 16}
    engine = new_engine(three_heads, Engine, tp=request.param, **settings)
    yield engine
    engine.close()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "ch11_quant_tp.worker" in " ".join(child.cmdline())]


class TestOneEngine:
    @pytest.mark.parametrize("seed", [None, 5])
    def test_any_number_of_ranks_gives_the_same_tokens(self, engine, baseline, seed: int | None):
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0 if seed is None else 1.2, seed=seed, n=2)
        results = engine.generate_batch(PROMPTS, params)
        expected = baseline.generate_batch(PROMPTS, params)
        assert [result.token_ids for result in results] == [result.token_ids for result in expected]
        assert engine.stats().preemptions > 0
        assert engine.stats().prefix_cache_hit_tokens > 0
        assert len(children()) == engine.config.tp - 1

    def test_scored_prompts_and_logprobs_are_gathered_from_all_ranks(self, engine, baseline):
        params = SamplingParams(max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
        ours, theirs = engine.generate(TEXT[:13], params=params), baseline.generate(TEXT[:13], params=params)
        for mine, reference in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [t for t, _ in mine.top] == [t for t, _ in reference.top]
            assert mine.logprob == pytest.approx(reference.logprob, abs=2e-3)
        assert [e and e.token_id for e in ours.prompt_logprobs] == [e and e.token_id for e in theirs.prompt_logprobs]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 48, 49152])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("unit", [1, 32])
def test_shares_follow_each_other_and_leave_nothing_out(total: int, size: int, unit: int):
    parts = [share(total, rank, size, unit) for rank in range(size)]
    assert [parts[0].start, parts[-1].stop] == [0, total]
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    assert all(part.start % unit == 0 for part in parts if part.start < total)


@pytest.mark.parametrize("name", ["llama-attention-bias", "llama-mlp-bias", "qwen2-tied", "qwen3", "llama-head-dim"])
def test_shards_add_up_to_the_model(tmp_path, name: str, monkeypatch: pytest.MonkeyPatch):
    """Biases of row parallel layers are added once. The sums are made here, in one process, in lockstep."""
    save_checkpoint(tmp_path, *CHECKPOINTS[name])
    full = ModelConfig.from_folder(tmp_path)
    ids = torch.arange(3, 15)
    expected = our_logits(load_model(tmp_path, pack=False), ids)
    shards = [Shard(full, rank, 2) for rank in range(2)]
    models = [load_model(tmp_path, pack=False, config=shard.config, take=shard.take) for shard in shards]
    assert sum(model.layers[0].mlp.down.weight.numel() for model in models) == 48 * full.intermediate_size
    logits = in_lockstep(models, shards, ids)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


def in_lockstep(models, shards, ids: torch.Tensor) -> torch.Tensor:
    """Both ranks in threads, with collectives that meet at a barrier instead of a network."""
    import threading

    import torch.distributed as dist

    barrier = threading.Barrier(2)
    parts: list[torch.Tensor | None] = [None, None]
    rank_of = threading.local()

    def all_reduce(tensor: torch.Tensor) -> None:
        parts[rank_of.value] = tensor.clone()
        barrier.wait(20)
        total = parts[0] + parts[1]
        barrier.wait(20)
        tensor.copy_(total)

    def gather(tensor: torch.Tensor, into: list[torch.Tensor] | None, dst: int) -> None:
        parts[rank_of.value] = tensor
        barrier.wait(20)
        for target, source in zip(into or [], parts, strict=False):
            target.copy_(source)
        barrier.wait(20)

    results: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        rank_of.value = rank
        with torch.inference_mode():
            results[rank] = our_logits(shards[rank].connect(models[rank]), ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "gather", gather)
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    return results[0]


async def anext_to_the_end(stream) -> None:
    async for _ in stream:
        pass


def test_more_ranks_than_kv_heads_are_refused_with_the_numbers(three_heads):
    with pytest.raises(SetupError, match="TP=4: this model has 3 KV heads"):
        new_engine(three_heads, Engine, tp=4)


@pytest.mark.parametrize("busy", [True, False])
def test_a_rank_that_dies_ends_the_engine_with_an_error_to_everybody(three_heads, busy: bool):
    async def scenario() -> None:
        engine = new_engine(three_heads, Engine, tp=2, max_num_seqs=4)
        await engine.start()
        [rank] = children()
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        streams = [engine.submit(f"r{i}", [65, 66], params) for i in range(6 if busy else 0)]
        for stream in streams[:2]:
            await anext(stream)
        rank.kill()
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(anext_to_the_end(stream), 10)
        await asyncio.to_thread(wait_until, lambda: engine.error() is not None)
        with pytest.raises(EngineDeadError):
            engine.submit("late", [65], params)
        await asyncio.wait_for(engine.shutdown(), 20)
        assert not children()

    asyncio.run(scenario())


def test_ranks_start_and_end_with_the_server_and_two_servers_run_side_by_side(three_heads):
    settings = {"MODEL": str(three_heads), "TP": "2", "OMP_NUM_THREADS": "1"}
    body = {"prompt": TEXT[:9], "max_tokens": 8, "ignore_eos": True}
    with serve_chapter("ch11_quant_tp", **settings) as (url, process):
        with serve_chapter("ch11_quant_tp", **settings) as (other_url, _):
            texts = [
                requests.post(u + "/v1/completions", json=body, timeout=30).json()["choices"][0]["text"]
                for u in (url, other_url)
            ]
            assert texts[0] == texts[1]
        assert requests.get(url + "/health", timeout=5).status_code == 200
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 1
    assert not any(rank.is_running() for rank in ranks)


def test_ranks_end_when_rank_0_is_killed(three_heads):
    """Orphans would keep the port, the memory and a core."""
    with serve_chapter("ch11_quant_tp", MODEL=str(three_heads), TP="2") as (_, process):
        [rank] = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)


def test_torchrun_starts_the_same_code_on_two_addresses(three_heads, baseline):
    """As on two machines: two torchruns, each with a rank of its own, that meet at an address."""
    meet, port = free_port(), free_port()
    environment = os.environ | {
        "MODEL": str(three_heads),
        "TP": "2",
        "PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
                *("--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(meet)),
                *("-m", "ch11_quant_tp.worker"),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            try:
                return requests.get(url + "/health", timeout=5).status_code == 200
            except requests.ConnectionError:
                return False

        wait_until(ready, seconds=60)
        body = {"prompt": TEXT[:9], "max_tokens": 20, "ignore_eos": True}
        answer = requests.post(url + "/v1/completions", json=body, timeout=30).json()
        assert answer["choices"][0]["text"] == baseline.generate(TEXT[:9], params=GREEDY).text
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGTERM)
        ends = time.monotonic() + 20
        for process in processes:
            try:
                process.wait(max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_settings_reach_the_ranks_as_plain_data(three_heads):
    config = FullConfig(model=str(three_heads), tp=2, quant="int8")
    assert FullConfig(**config.model_dump(mode="json")) == config
    assert asdict(Shard(ModelConfig.from_folder(three_heads), 1, 2))["rank"] == 1
