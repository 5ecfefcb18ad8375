"""Which requests were answered fast enough, and the comparison of several engines as a table.

It knows runs as `shared.report.summarise` writes them; it knows no server and no engine.

    runs, Bounds -> attained, goodput, sustained rate -> rows for the terminal, Markdown
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.report import Result, Run

SUSTAINED = 0.9  # of the requests within both bounds, as in DistServe (arXiv:2401.09670, section 2)


@dataclass(frozen=True)
class Bounds:
    """What a request must keep to count as good [ms]."""

    ttft_ms: float
    tpot_ms: float

    def met_by(self, each: Mapping[str, Any]) -> bool:
        """`each` as `shared.report.summarise` writes a request."""
        tokens, ttft_ms = each["output_tokens"], each["ttft_ms"]
        if ttft_ms is None or ttft_ms > self.ttft_ms:
            return False
        return tokens < 2 or (each["e2e_ms"] - ttft_ms) / (tokens - 1) <= self.tpot_ms


def attained(run: Run, bounds: Bounds) -> float:
    """The share of a run's requests, the failed ones included, within both bounds."""
    return sum(map(bounds.met_by, run["each"])) / run["requests"]


def goodput(run: Run, bounds: Bounds) -> float:
    """Requests a second within both bounds."""
    return sum(map(bounds.met_by, run["each"])) / run["seconds"]


def rising(result: Result) -> list[Run]:
    return sorted((run for run in result["runs"] if "rate" in run), key=lambda run: run["rate"])


def overloaded(result: Result, bounds: Bounds) -> bool:
    return any(attained(run, bounds) < SUSTAINED for run in rising(result))


def sustained(result: Result, bounds: Bounds) -> Run | None:
    """The run at the highest rate up to which every rate was sustained."""
    best = None
    for run in rising(result):
        if attained(run, bounds) < SUSTAINED:
            break
        best = run
    return best


# --- what a person reads ----------------------------------------------------------------------------------------------


def one_row(who: str, run: Run, bounds: Bounds) -> str:
    ttft, tpot = (shown_ms(run[key], "p50") for key in ("ttft_ms", "tpot_ms"))
    failed = f", {run['failed']} failed" if run["failed"] else ""
    return (
        f"{who:<8} {run['load_name']:<22} {run['output_tokens_per_s']:>7.1f} tokens/s   TTFT {ttft:>7} ms   "
        f"TPOT {tpot:>5} ms   {attained(run, bounds):>4.0%} within bounds{failed}"
    )


def shown_ms(values: Mapping[str, float] | None, quantile: str) -> str:
    return "-" if values is None else f"{values[quantile]:,.0f}"


def table(results: Sequence[Result], bounds: Bounds) -> str:
    """Markdown: model, machine and dates, a row an engine, all runs, and the settings."""
    machine = results[-1]["machine"]
    dates = sorted(run["date"][:10] for result in results for run in result["runs"])
    models = ", ".join(dict.fromkeys(result["model"] for result in results))
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    lines = [
        f"{models}; {gpu}{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['platform']}; Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.",
        "",
        f"A rate is sustained if {SUSTAINED:.0%} of its requests have their first token within "
        f"{bounds.ttft_ms / 1000:g} s and a TPOT of at most {bounds.tpot_ms:g} ms; goodput counts those requests only.",
        "",
        "| engine | tokens/s, 1 client | most tokens/s | with clients | TTFT there, p50 / p99 | TPOT there, p50 | "
        "sustained rate, conversations/s | goodput at it, requests/s |",
        "|---|---|---|---|---|---|---|---|",
        *(one_engine(result, bounds) for result in results),
        "",
        "| engine | load | requests | tokens/s | TTFT, p50 / p99 | TPOT, p50 / p99 | within bounds | peak memory |",
        "|---|---|---|---|---|---|---|---|",
        *(one_run(result["name"], run, bounds) for result in results for run in result["runs"]),
    ]
    settings = [
        f"{r['name']}: {' '.join(f'{k}={v}' for k, v in r['settings'].items())}" for r in results if r["settings"]
    ]
    lines += ["", f"Settings. {'; '.join(settings)}."] if settings else []
    return "\n".join(lines) + "\n"


def one_engine(result: Result, bounds: Bounds) -> str:
    """A row of the first table: an engine alone, at its best, and as far as it sustains a rate."""
    closed = [run for run in result["runs"] if run["load"] == "closed"]
    alone = [f"{run['output_tokens_per_s']:.1f}" for run in closed if run["concurrency"] == 1]
    cells = [result["name"], *(alone or ["-"]), "-", "-", "-", "-"]
    if closed:
        best = max(closed, key=lambda run: run["output_tokens_per_s"])
        ttft = f"{shown_ms(best['ttft_ms'], 'p50')} / {shown_ms(best['ttft_ms'], 'p99')} ms"
        tpot = f"{shown_ms(best['tpot_ms'], 'p50')} ms"
        cells[2:] = [f"{best['output_tokens_per_s']:.1f}", str(best["concurrency"]), ttft, tpot]
    rates, highest = rising(result), sustained(result, bounds)
    if not rates:
        cells += ["-", "-"]
    elif highest is None:
        cells += [f"below {rates[0]['rate']:g}", "-"]
    else:
        more = ", the highest tried" if highest is rates[-1] else ""
        cells += [f"{highest['rate']:g}{more}", f"{goodput(highest, bounds):.2f}"]
    return f"| {' | '.join(cells)} |"


def one_run(name: str, run: Run, bounds: Bounds) -> str:
    """A row of the second table."""
    memory = run["peak_memory_bytes"]
    times = (f"{shown_ms(run[key], 'p50')} / {shown_ms(run[key], 'p99')} ms" for key in ("ttft_ms", "tpot_ms"))
    cells = (
        name,
        run["load_name"],
        f"{run['requests']}" + (f" ({run['failed']} failed)" if run["failed"] else ""),
        f"{run['output_tokens_per_s']:.1f}",
        *times,
        f"{attained(run, bounds):.0%}",
        "-" if memory is None else f"{memory / 1e6:,.0f} MB",
    )
    return f"| {' | '.join(cells)} |"
