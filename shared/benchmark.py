"""The offline and the online benchmark of every chapter; `--base-url` measures any other OpenAI-compatible server.

It puts the parts together and knows the command line. Traffic, client, server process and figures are in modules of
their own.

    options -> limits -> server or engine -> workloads -> runs -> table, results/*.json and *.png, one line of JSON
"""

import asyncio
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from shared import workload as traffic
from shared.engine import BaseOfflineEngine, Message, OnlineInterface, RequestError, SamplingParams, SetupError
from shared.load_client import ChatClient, Outcome, run_workload
from shared.options import parse_offline, parse_online
from shared.report import TABLE_HEAD, Result, Run, heading, one_line, remarks, save, summarise, table_row
from shared.server_process import running_server
from shared.workload import Workload, WorkloadConfig


def online(
    folder: Path, config: WorkloadConfig, bytes_per_weight: float | None = None, argv: Sequence[str] | None = None
) -> None:
    """Measure the server of the chapter in `folder` over HTTP. `config` holds the chapter's defaults.

    bytes_per_weight: of weights that aren't kept in the engine's dtype, for the limit of decoding.
    Exits with status 1 if the server can't be measured or all requests of a run fail, 2 for a wrong option, and 130
    after Ctrl-C.
    """
    with one_line_on_interrupt():
        args, config = parse_online(folder.name, config, argv)
        if args.base_url:
            finish(asyncio.run(measure_online(args, config, args.base_url, describe_run(args, "online", None))), args)
            return
        result = describe_run(args, "online", bytes_per_weight)
        args.api_key = os.environ.get("API_KEY", "")  # if it is set, the server asks for it
        with running_server(folder, args.port, args.startup_timeout) as server:
            result = asyncio.run(measure_online(args, config, server.base_url, result, server.pid))
        finish(result, args)


async def measure_online(
    args: Namespace, config: WorkloadConfig, base_url: str, result: Result, pid: int | None = None
) -> Result:
    """Send all loads to the server at `base_url`; `pid` is its process, if it is ours. Prints the table as it grows."""
    async with ChatClient(base_url, args.model or "", args.api_key or "", args.timeout, args.ignore_eos) as client:
        client.model = client.model or await client.find_model()
        result["model"] = client.model
        print(heading(result), flush=True)
        if args.warmup:
            outcomes, _ = await run_workload(client, traffic.warm_up(config, args.warmup))
            if all(outcome.error for outcome in outcomes):
                raise SetupError(f"the warm-up failed, so nothing is measured: {outcomes[0].error}")
        print(f"\n{TABLE_HEAD}", flush=True)
        for workload in workloads(args.load, config):
            bar = tqdm(total=workload.requests, desc=workload.load, unit="request", leave=False, disable=None)
            with bar, peak_memory(pid) as memory:
                outcomes, seconds = await run_workload(client, workload, on_done=bar.update)
            add_run(result, summarise(workload.names(), outcomes, seconds, memory()))
    return result


def workloads(load: str, config: WorkloadConfig) -> Iterator[Workload]:
    """The workloads that `--load` names."""
    if load in ("batch", "all"):
        yield traffic.batch(config)
    if load in ("closed", "all"):
        yield from (traffic.closed_loop(config, concurrency) for concurrency in config.concurrency)
    if load in ("realistic", "all"):
        yield traffic.realistic(config)


def offline(
    folder: Path,
    make_engine: Callable[[], BaseOfflineEngine],
    config: WorkloadConfig,
    batch_sizes: Sequence[int],
    bytes_per_weight: float | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Measure the chapter's engine in this process, without HTTP: one request at a time, and batches."""
    with one_line_on_interrupt():
        args, config = parse_offline(folder.name, config, batch_sizes, argv)
        import torch  # seconds to import, and a wrong option is told at once

        if args.threads is not None:
            torch.set_num_threads(args.threads)
        result = describe_run(args, "offline", bytes_per_weight)
        engine = make_engine()
        try:
            result["model"] = engine.model_id
            print(heading(result), flush=True)
            measure_offline(args, config, engine, result)
        except RequestError as error:
            raise SetupError(f"the engine refuses this workload: {error}") from None
        finally:
            if isinstance(engine, OnlineInterface):
                asyncio.run(engine.shutdown())
        finish(result, args)


def measure_offline(args: Namespace, config: WorkloadConfig, engine: BaseOfflineEngine, result: Result) -> None:
    """`stream` for one request at a time, since it tells when the first token came, and `generate_batch`."""
    params = SamplingParams(max_tokens=config.output_tokens, ignore_eos=args.ignore_eos)
    prompts = chat_prompts(engine, traffic.warm_up(config, args.warmup))
    for prompt in prompts:
        engine.generate(prompt, params=params)
    print(f"\n{TABLE_HEAD}", flush=True)
    prompts = chat_prompts(engine, traffic.batch(config))
    with peak_memory(os.getpid()) as memory:
        began = time.perf_counter()
        bar = tqdm(prompts, desc="one at a time", unit="request", leave=False, disable=None)
        outcomes = [generate_one(engine, prompt, params) for prompt in bar]
        seconds = time.perf_counter() - began
    add_run(result, summarise({"load": "generate", "concurrency": 1}, outcomes, seconds, memory()))
    peer = [make_peer()] if args.peer else []
    for size in args.batch_sizes:
        prompts = chat_prompts(engine, traffic.closed_loop(config, size))
        groups = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]  # whole ones
        for runner in peer:
            runner.generate_batch(groups[0], params)  # warm-up
        for run in measure_batches([engine, *peer], groups, params, size):
            add_run(result, run)


def make_peer() -> BaseOfflineEngine:
    from shared.peer import TransformersPeer  # a second model in memory, if it is asked for

    return TransformersPeer()


def measure_batches(
    engines: Sequence[BaseOfflineEngine], groups: Sequence[list[str]], params: SamplingParams, size: int
) -> Iterator[Run]:
    """Run each group on one engine after the other, so that a noisy moment of the machine meets them all alike."""
    outcomes: list[list[Outcome]] = [[] for _ in engines]
    seconds = [0.0] * len(engines)
    with peak_memory(os.getpid()) as memory:
        for group in tqdm(groups, desc=f"{size} together", unit="batch", leave=False, disable=None):
            for i, engine in enumerate(engines):
                began = time.perf_counter()
                outcomes[i] += generate_batch(engine, group, params)
                seconds[i] += time.perf_counter() - began
    for i in range(len(engines)):
        load = "generate_batch" if i == 0 else engines[i].model_id
        yield summarise({"load": load, "batch_size": size}, outcomes[i], seconds[i], memory() if i == 0 else None)


def chat_prompts(engine: BaseOfflineEngine, workload: Workload) -> list[str]:
    """The prompts as the server would build them, of conversations of one turn."""
    messages = (conversation.messages([]) for conversation in workload.conversations)
    return [engine.build_prompt([Message.model_validate(message) for message in turn]) for turn in messages]


def generate_one(engine: BaseOfflineEngine, prompt: str, params: SamplingParams) -> Outcome:
    began, first_s, tokens, metrics = time.perf_counter(), None, 0, None
    for delta in engine.stream(prompt, params=params):
        tokens += len(delta.token_ids)
        metrics = delta.metrics or metrics
        if first_s is None and tokens:
            first_s = time.perf_counter() - began
    assert metrics is not None, "the last delta has the metrics"
    return Outcome(time.perf_counter() - began, first_s, metrics.input_tokens, tokens)


def generate_batch(engine: BaseOfflineEngine, prompts: list[str], params: SamplingParams) -> list[Outcome]:
    """Each request of a batch is done when the batch is; TTFT is known if the engine tells it."""
    began = time.perf_counter()
    results = engine.generate_batch(prompts, params)
    seconds = time.perf_counter() - began
    return [
        Outcome(
            seconds,
            None if result.metrics.ttft_ms is None else result.metrics.ttft_ms / 1000,
            result.metrics.input_tokens,
            len(result.token_ids),
        )
        for result in results
    ]


# --- around both ------------------------------------------------------------------------------------------------------


@contextmanager
def one_line_on_interrupt(
    line: str = "benchmark: stopped by Ctrl-C; nothing was saved, and no server is left.",
) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{line}", file=sys.stderr)
        raise SystemExit(130) from None


def describe_run(args: Namespace, benchmark: str, bytes_per_weight: float | None) -> Result:
    """What is measured on what, before any of it. The model, dtype and limits of another's server aren't known."""
    from shared import machine  # torch and transformers, which take seconds to import
    from shared.checkpoint import checkpoint_folder, model_id, weight_count
    from shared.config import FIRST_CHAPTER, EngineConfig

    result: Result = {
        "name": args.output.stem.removesuffix(f"-{benchmark}"),
        "benchmark": benchmark,
        "busy_share": machine.busy_share(),
    }
    options = {name: value for name, value in vars(args).items() if name not in ("output", "api_key")}
    if getattr(args, "base_url", None):
        described: Result = {"machine": machine.describe(), "settings": {}, "limits": None}
    else:
        config = EngineConfig()
        dtype, device = config.torch_dtype(), config.torch_device()
        weights = weight_count(checkpoint_folder(config.model))
        weight_bytes = None if bytes_per_weight is None else int(weights * bytes_per_weight)
        limits = asdict(machine.limits(weights, dtype, device, weight_bytes))
        described = {
            "model": model_id(config.model),
            "weights": weights,
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "machine": machine.describe(device),
            "settings": {name: os.environ[name] for name in FIRST_CHAPTER if os.environ.get(name)},
            "limits": {name: float(f"{value:.4g}") for name, value in limits.items()},
        }
    return {**result, **described, "options": options, "runs": []}


@contextmanager
def peak_memory(pid: int | None) -> Iterator[Callable[[], int | None]]:
    """A function that tells, after the block, the most bytes that the process held in it. None: no process of ours."""
    if pid is None:
        yield lambda: None
        return
    from shared.machine import PeakMemory

    with PeakMemory(pid) as memory:
        yield lambda: memory.bytes


def add_run(result: Result, run: Run) -> None:
    result["runs"].append(run)
    print(table_row(run), flush=True)


def finish(result: Result, args: Namespace) -> None:
    """Remarks, files, and the line of JSON. Exits with status 1 if a run has measured nothing."""
    from shared.plots import draw_load  # matplotlib, which takes a second to import

    save(result, args.output)
    if any(run["failed"] < run["requests"] for run in result["runs"]):
        draw_load([result], args.output.with_suffix(".png"))
    print(*remarks(result), f"saved: {args.output}", sep="\n")
    print(one_line(result), flush=True)
    if any(run["failed"] == run["requests"] for run in result["runs"]):
        raise SystemExit("benchmark: all requests of a load failed; the reasons are above.")
