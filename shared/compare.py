"""make compare: every chapter's server, one after another, under the same seeded load, in one figure and one table.

Peers are other OpenAI-compatible servers that run already. A run that is finished is kept: stopped and started again,
the comparison goes on where it was.

    CHAPTERS, peers -> server -> closed loops, rising rates -> results/compare/<name>.json -> compare.png, compare.md
"""

import argparse
import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tqdm import tqdm

from shared import workload as traffic
from shared.benchmark import one_line_on_interrupt, peak_memory
from shared.chapters import CHAPTERS, ROOT
from shared.config import FIRST_CHAPTER
from shared.errors import SetupError
from shared.goodput import Bounds, attained, one_row, overloaded, table
from shared.load_client import ChatClient, run_workload
from shared.options import Parser, base_url, positive
from shared.report import RESULTS, Result, run_name, summarise
from shared.server_process import running_server
from shared.workload import Workload, WorkloadConfig


@dataclass(frozen=True)
class Loads:
    """What an engine is sent.

    requests: of each run, at least; a closed loop sends three a client
    seconds: for conversations to begin in, at each rate; a queue that builds up needs time to show
    """

    concurrency: tuple[int, ...]
    rates: tuple[float, ...]  # conversations that begin a second, rising
    requests: int
    seconds: float


TRAFFIC = WorkloadConfig(prompt_tokens=64, output_tokens=32, system_tokens=128)
LOADS = Loads((1, 2, 4, 8, 16, 32), (0.5, 1.0, 1.5, 2.0, 3.0, 4.0), 32, 30)
REDUCED = {"ch01": Loads((1, 4), (0.05,), 4, 30), "ch05": Loads((1, 4, 16), (0.25, 0.5), 12, 30)}

QUICK_TRAFFIC = replace(TRAFFIC, prompt_tokens=32, output_tokens=16, system_tokens=64)
QUICK_LOADS = Loads((1, 4, 16), (0.5, 2.0, 8.0), 12, 10)
QUICK_REDUCED = {"ch01": Loads((1, 2), (0.1,), 2, 10), "ch05": Loads((1, 4), (0.5,), 6, 10)}


@dataclass(frozen=True)
class Contestant:
    """A line of the figure: a chapter's server, started with `settings`, or a peer at `url`."""

    name: str
    loads: Loads
    reduced: bool = False
    folder: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    url: str = ""

    @property
    def label(self) -> str:
        quant = [f"{key}={value}" for key, value in self.settings.items() if key == "QUANT"]
        return " ".join([self.name, *quant, *(["(reduced load)"] if self.reduced else [])])


def contestants(quick: bool, peers: Sequence[tuple[str, str]]) -> list[Contestant]:
    """The chapters in the order of the book, then the peers."""
    loads, reduced = (QUICK_LOADS, QUICK_REDUCED) if quick else (LOADS, REDUCED)
    ours = [
        Contestant(c.name, reduced.get(c.name, loads), c.name in reduced, ROOT / c.folder, c.compare) for c in CHAPTERS
    ]
    return ours + [Contestant(name, loads, url=url) for name, url in peers]


def workloads(who: Contestant, config: WorkloadConfig) -> list[Workload]:
    """Closed loops, then rising rates. Each has a seed of its own: a prefix cache knows nothing of the one before."""
    loads, turns = who.loads, 1 - config.multi_turn + config.multi_turn * sum(traffic.TURNS) / 2
    config = replace(config, requests=loads.requests)
    closed = [traffic.closed_mix(replace(config, seed=c), c) for c in loads.concurrency]
    rising = [
        traffic.realistic(
            replace(config, rate=rate, requests=max(loads.requests, round(rate * loads.seconds * turns)), seed=100 + i)
        )
        for i, rate in enumerate(loads.rates)
    ]
    return closed + rising


def measure(who: Contestant, config: WorkloadConfig, bounds: Bounds, path: Path) -> None:
    """Make the runs that `path` lacks, and write it after each. Raises SetupError if the server can't be measured."""
    identity: Result = {"name": who.label, "settings": dict(who.settings), "url": who.url, "traffic": asdict(config)}
    result = read(path, identity) or {**identity, "runs": []}
    wanted = {(name(load), load.requests): load for load in workloads(who, config)}
    result["runs"] = [run for run in result["runs"] if (run["load_name"], run["requests"]) in wanted]
    done = {run["load_name"] for run in result["runs"]}
    todo = [load for load in wanted.values() if name(load) not in done]
    if not todo or (overloaded(result, bounds) and all(load.rate for load in todo)):
        return
    environment = {k: v for k, v in os.environ.items() if k not in FIRST_CHAPTER} | dict(who.settings)
    with served(who, environment) as (url, pid):
        asyncio.run(run_all(who, url, pid, todo, config, bounds, result, path))


@contextmanager
def served(who: Contestant, environment: Mapping[str, str]) -> Iterator[tuple[str, int | None]]:
    if who.folder is None:
        yield who.url, None
        return
    with running_server(who.folder, environment=environment) as server:
        yield server.base_url, server.pid


async def run_all(
    who: Contestant,
    url: str,
    pid: int | None,
    todo: Sequence[Workload],
    config: WorkloadConfig,
    bounds: Bounds,
    result: Result,
    path: Path,
) -> None:
    from shared import machine  # torch, which takes seconds to import

    api_key = os.environ.get("API_KEY", "") if who.folder else ""
    async with ChatClient(url, api_key=api_key) as client:
        client.model = result["model"] = await client.find_model()
        await warm_up(client, config)
        result["remark"] = "" if client.ignore_eos else " (without ignore_eos)"
        for load in todo:
            if load.rate and overloaded(result, bounds):
                break  # a higher rate only makes a longer queue
            title = f"{who.name}, {name(load)}"
            bar = tqdm(total=load.requests, desc=title, unit="request", leave=False, disable=None)
            with bar, peak_memory(pid) as memory:
                outcomes, seconds = await run_workload(client, load, on_done=bar.update)
            run = summarise(load.names(), outcomes, seconds, memory()) | {"load_name": name(load)}
            run["machine"] = machine.describe()
            result["runs"].append(run)
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(one_row(who.name, run, bounds), flush=True)


async def warm_up(client: ChatClient, config: WorkloadConfig) -> None:
    """Raises SetupError if no request is answered. A server that refuses `ignore_eos` is asked without it."""
    outcomes, _ = await run_workload(client, traffic.warm_up(config, 2))
    error = outcomes[0].error or ""
    if client.ignore_eos and "ignore_eos" in error:
        print(f"{client.base_url} refuses ignore_eos: it ends its answers where it likes, so that they are shorter.")
        client.ignore_eos = False
        await warm_up(client, config)
    elif all(outcome.error for outcome in outcomes):
        raise SetupError(f"the warm-up failed: {error}")


def read(path: Path, identity: Result) -> Result | None:
    """What was measured before, if it was the same that is asked for now."""
    try:
        result = json.loads(path.read_text())
        same = all(result[key] == json.loads(json.dumps(value)) for key, value in identity.items())
    except (OSError, ValueError, LookupError):
        return None
    return result if same else None


def name(load: Workload) -> str:
    return run_name(load.names())


# --- the command line -------------------------------------------------------------------------------------------------


def peer(text: str) -> tuple[str, str]:
    label, equals, url = text.partition("=")
    if not equals or not label or "/" in label:
        raise argparse.ArgumentTypeError(f"{text} must be NAME=URL, such as vllm=http://127.0.0.1:8000/v1")
    return label, base_url(url)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="python -m shared.compare", description="Measure all chapters, and other servers, side by side."
    )
    parser.add_argument("--quick", action="store_true", help="shorter texts and fewer runs: a few minutes")
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=URL", help="a running server")
    parser.add_argument("--again", action="store_true", help="measure anew what is in results/ already")
    parser.add_argument("--ttft", type=positive, default=1000, metavar="MS", help="bound of goodput (default: 1000)")
    parser.add_argument("--tpot", type=positive, default=200, metavar="MS", help="bound of goodput (default: 200)")
    args = parser.parse_args(argv)
    names = [label for label, _ in args.peer]
    taken = [c.name for c in CHAPTERS]
    for label in names:
        if names.count(label) > 1 or label in taken:
            parser.error(f"--peer {label}=...: the name is taken")
    with one_line_on_interrupt("compare: stopped by Ctrl-C; finished runs are kept. Run it again to go on."):
        compare(args.quick, args.peer, args.again, Bounds(args.ttft, args.tpot))


def compare(
    quick: bool, peers: Sequence[tuple[str, str]], again: bool, bounds: Bounds, results: Path = RESULTS
) -> None:
    """All of it. Exits with status 1, after the figure and the table of the others, if a server can't be measured."""
    from shared.plots import draw_comparison  # matplotlib, which takes a second to import

    stem = "compare-quick" if quick else "compare"
    folder = results / stem
    folder.mkdir(parents=True, exist_ok=True)
    config = QUICK_TRAFFIC if quick else TRAFFIC
    measured, failures = [], []
    for who in contestants(quick, peers):
        path = folder / f"{who.name}.json"
        if again:
            path.unlink(missing_ok=True)
        try:
            measure(who, config, bounds, path)
        except SetupError as error:
            failures.append(f"{who.name}: {error}")
        result = json.loads(path.read_text()) if path.is_file() else None
        if result and any(run["each"] for run in result["runs"]):
            measured.append(result | {"name": result["name"] + result["remark"]})
    if measured:
        within = f"TTFT {bounds.ttft_ms / 1000:g} s and TPOT {bounds.tpot_ms:g} ms"
        machine = measured[-1]["runs"][-1]["machine"]
        title = f"{measured[0]['model']} on {machine['processor']}, {machine['cores']} cores, {machine['date'][:10]}"
        draw_comparison(measured, lambda run: attained(run, bounds), within, title, folder.with_suffix(".png"))
        text = table(measured, bounds)
        folder.with_suffix(".md").write_text(text)
        print(f"\n{text}\nsaved: {folder.with_suffix('.png')}, {folder.with_suffix('.md')}")
    if failures:
        raise SystemExit("\n".join(["compare: not all could be measured.", *failures]))


if __name__ == "__main__":
    main()
