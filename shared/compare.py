"""make compare: every chapter's server, one after another, under the same seeded load, in one figure and one table.

Peers are other OpenAI-compatible servers that run already. A run that is finished is kept: stopped and started again,
the comparison goes on where it was.

    CHAPTERS, peers -> server -> closed loops, rising rates -> results/compare/<name>.json -> compare.png, compare.md
"""

import argparse
import asyncio
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tqdm import tqdm

from shared import machine
from shared import workload as traffic
from shared.benchmark import one_line_on_interrupt, peak_memory
from shared.chapters import CHAPTERS, ROOT
from shared.config import FIRST_CHAPTER, EngineConfig
from shared.errors import SetupError
from shared.goodput import Bounds, attained, one_row, overloaded, table
from shared.load_client import ChatClient, run_workload
from shared.options import Parser, base_url, positive
from shared.report import BUSY, RESULTS, Result, run_name, save, summarise
from shared.server_process import running_server
from shared.workload import Workload, WorkloadConfig

# What the reader may set for all chapters, beside what a chapter's `compare` sets for itself.
FOR_ALL = (*(name.upper() for name in EngineConfig.model_fields), "NATIVE")


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
    """The chapters in the order of the course, then the peers."""
    loads, reduced = (QUICK_LOADS, QUICK_REDUCED) if quick else (LOADS, REDUCED)
    ours = [
        Contestant(c.name, reduced.get(c.name, loads), c.name in reduced, ROOT / c.folder, c.compare) for c in CHAPTERS
    ]
    return ours + [Contestant(name, loads, url=url) for name, url in peers]


def workloads(who: Contestant, config: WorkloadConfig) -> list[Workload]:
    """Closed loops, then rising rates. Each has a seed of its own: a prefix cache knows nothing of the one before.

    The same concurrency or rate is the same traffic to all, as far as a reduced load goes.
    """
    loads, turns = who.loads, 1 - config.multi_turn + config.multi_turn * sum(traffic.TURNS) / 2
    config = replace(config, requests=loads.requests)
    closed = [traffic.closed_mix(replace(config, seed=c), c) for c in loads.concurrency]
    rising = [
        traffic.realistic(
            replace(
                config,
                rate=rate,
                requests=max(loads.requests, round(rate * loads.seconds * turns)),
                seed=1000 + round(100 * rate),
            )
        )
        for rate in loads.rates
    ]
    return closed + rising


class Measurement:
    """The runs of one contestant: those that `path` has already, and those that are still to be made.

    Kept runs count only if they were made with the same traffic, settings, machine, versions and engine code. What
    `shared/` does to a figure isn't looked at: measure with `--again` after a change there.
    """

    def __init__(self, who: Contestant, config: WorkloadConfig, bounds: Bounds, path: Path) -> None:
        self.who, self.config, self.bounds, self.path = who, config, bounds, path
        self.loads = {(run_name(load.names()), load.requests): load for load in workloads(who, config)}
        described = machine.describe(EngineConfig().torch_device())
        settings = {name: os.environ[name] for name in FOR_ALL if os.environ.get(name)} if who.folder else {}
        same: Result = {
            "name": who.label,
            "settings": settings | dict(who.settings),
            "url": who.url,
            "code": engine_code(who.folder) if who.folder else "",
            "traffic": asdict(config),
            "machine": {key: value for key, value in described.items() if key != "date"},
        }
        self.result: Result = {**json.loads(json.dumps(same)), "model": "", "shorter": False, "runs": []}
        kept = self._kept()
        if kept is not None:
            self.result = kept

    def _kept(self) -> Result | None:
        """What the file has of what is asked for now, or None."""
        try:
            kept = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            kept = None
        if not isinstance(kept, dict) or kept.keys() != self.result.keys():
            print(f"{self.who.name}: {self.path} can't be read or is of another version; it is measured anew")
            return None
        others = [key for key in kept if key not in ("model", "shorter", "runs") and kept[key] != self.result[key]]
        if others:
            print(f"{self.who.name}: measured before with other {', '.join(others)}; it is measured anew")
            return None
        return kept | {"runs": [run for run in kept["runs"] if (run["load_name"], run["requests"]) in self.loads]}

    def todo(self) -> list[Workload]:
        """The loads that lack a run. A higher rate than one that was too much would only make a longer queue."""
        done, over = {run["load_name"] for run in self.result["runs"]}, overloaded(self.result, self.bounds)
        return [load for (name, _), load in self.loads.items() if name not in done and not (over and load.rate)]

    def run(self) -> None:
        """Make the runs that are lacking, and keep each as soon as it is finished.

        Raises SetupError if the server can't be measured; the runs before that stay.
        """
        if self.todo():
            with served(self.who) as (url, pid):
                asyncio.run(self._run(url, pid))

    async def _run(self, url: str, pid: int | None) -> None:
        api_key = os.environ.get("API_KEY", "") if self.who.folder else ""
        async with ChatClient(url, api_key=api_key) as client:
            client.model = await client.find_model()
            if self.result["runs"] and client.model != self.result["model"]:
                print(f"{self.who.name}: measured before with {self.result['model']}, it serves {client.model} now")
                self.result |= {"runs": [], "shorter": False}
            self.result["model"] = client.model
            await warm_up(client, self.config)
            while todo := self.todo():
                await self._add(client, todo[0], pid)

    async def _add(self, client: ChatClient, load: Workload, pid: int | None) -> None:
        name = run_name(load.names())
        bar = tqdm(total=load.requests, desc=f"{self.who.name}, {name}", unit="request", leave=False, disable=None)
        with bar, peak_memory(pid) as memory:
            outcomes, seconds = await run_workload(client, load, on_done=bar.update)
        run = summarise(load.names(), outcomes, seconds, memory())
        reasons = "; ".join(f"{count} failed: {reason}" for reason, count in run["failures"].items())
        if run["failed"] == run["requests"]:
            raise SetupError(f"{name}: no request was answered. {reasons}")
        wanted = sum(turn.max_tokens for conversation in load.conversations for turn in conversation.turns)
        self.result["shorter"] |= not run["failed"] and run["output_tokens"] < wanted
        self.result["runs"].append(run | {"load_name": name, "date": machine.describe()["date"]})
        save(self.result, self.path)
        print(one_row(self.who.name, self.result["runs"][-1], self.bounds), *([reasons] if reasons else []), sep="\n")


@contextmanager
def served(who: Contestant) -> Iterator[tuple[str, int | None]]:
    """Where the contestant answers, and the process that does, if it is ours."""
    if who.folder is None:
        yield who.url, None
        return
    environment = {k: v for k, v in os.environ.items() if k not in FIRST_CHAPTER} | dict(who.settings)
    with running_server(who.folder, environment=environment) as server:
        yield server.base_url, server.pid


async def warm_up(client: ChatClient, config: WorkloadConfig) -> None:
    """Raises SetupError if no request is answered. A server that refuses `ignore_eos` is asked without it."""
    outcomes, _ = await run_workload(client, traffic.warm_up(config, 2))
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if client.ignore_eos and any("ignore_eos" in error for error in errors):
        print(f"{client.base_url} refuses ignore_eos: it ends its answers where it likes, so that they are shorter.")
        client.ignore_eos = False
        await warm_up(client, config)
    elif len(errors) == len(outcomes):
        raise SetupError(f"the warm-up failed: {errors[0]}")


def engine_code(folder: Path) -> str:
    """A hash of the engines of the chapter in `folder` and of those before it, which it may import."""
    digest = hashlib.sha256()
    for chapter in sorted(path for path in folder.parent.glob("ch[0-9][0-9]_*") if path.name <= folder.name):
        for file in sorted([*chapter.glob("0[45]_*.py"), *chapter.glob("[a-z]*.py"), *chapter.glob("*.cpp")]):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


# --- the command line -------------------------------------------------------------------------------------------------


def peer(text: str) -> tuple[str, str]:
    label, equals, url = text.partition("=")
    if not equals or not re.fullmatch(r"\w[\w.-]*", label):
        raise argparse.ArgumentTypeError(
            f"{text} must be NAME=URL, such as vllm=http://127.0.0.1:8000/v1; a name has letters, digits, '.', '_', '-'"
        )
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"{folder}: {error.strerror}") from None
    busy = machine.busy_share()
    if busy > BUSY:
        print(f"warning: other programs take {busy:.0%} of the processor: figures will be low, and not comparable")
    if again and peers:
        print("A peer's prefix cache may know this traffic from the last time: start it anew before --again.")
    config = QUICK_TRAFFIC if quick else TRAFFIC
    measured, failures = [], []
    for who in contestants(quick, peers):
        path = folder / f"{who.name}.json"
        if again:
            path.unlink(missing_ok=True)
        measurement = Measurement(who, config, bounds, path)
        try:
            measurement.run()
        except SetupError as error:
            failures.append(f"{who.name}: {error}")
        result = measurement.result
        if result["runs"]:
            measured.append(result | {"name": result["name"] + " (shorter answers)" * result["shorter"]})
    if measured:
        within = f"TTFT {bounds.ttft_ms / 1000:g} s and TPOT {bounds.tpot_ms:g} ms"
        here, date = measured[0]["machine"], measured[-1]["runs"][-1]["date"][:10]
        title = f"{measured[0]['model']} on {here.get('gpu', here['processor'])}, {here['cores']} cores, {date}"
        draw_comparison(measured, lambda run: attained(run, bounds), within, title, folder.with_suffix(".png"))
        text = table(measured, bounds)
        folder.with_suffix(".md").write_text(text)
        print(f"\n{text}\nsaved: {folder.with_suffix('.png')}, {folder.with_suffix('.md')}")
    if failures:
        raise SystemExit("\n".join(["compare: not all could be measured.", *failures]))


if __name__ == "__main__":
    main()
