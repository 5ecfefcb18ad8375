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
    """Markdown: the machine, a row an engine, and all runs."""
    machine = results[-1]["runs"][-1]["machine"]
    dates = sorted(run["machine"]["date"][:10] for result in results for run in result["runs"])
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, {machine['platform']}; "
        f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}; "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}.",
        "",
        f"A rate is sustained if {SUSTAINED:.0%} of its requests have their first token within "
        f"{bounds.ttft_ms / 1000:g} s and a TPOT of at most {bounds.tpot_ms:g} ms; goodput counts those requests only.",
        "",
        "| engine | tokens/s, 1 client | most tokens/s | with clients | TTFT there, p50 / p99 | TPOT there, p50 | "
        "sustained rate, conversations/s | goodput at it, requests/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        closed = [run for run in result["runs"] if run["load"] == "closed" and run["ttft_ms"]]
        if not closed:
            continue
        best, rate = max(closed, key=lambda run: run["output_tokens_per_s"]), sustained(result, bounds)
        alone = [f"{run['output_tokens_per_s']:.1f}" for run in closed if run["concurrency"] == 1]
        slowest = rising(result)[0]["rate"] if rising(result) else None
        lines.append(
            f"| {result['name']} | {alone[0] if alone else '-'} | {best['output_tokens_per_s']:.1f} | "
            f"{best['concurrency']} | {shown_ms(best['ttft_ms'], 'p50')} / {shown_ms(best['ttft_ms'], 'p99')} ms | "
            f"{shown_ms(best['tpot_ms'], 'p50')} ms | "
            + (
                f"{rate['rate']:g} | {goodput(rate, bounds):.2f} |"
                if rate
                else ("- | - |" if slowest is None else f"below {slowest:g} | - |")
            )
        )
    lines += [
        "",
        "| engine | load | requests | tokens/s | TTFT, p50 / p99 | TPOT, p50 / p99 | within bounds | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for run in result["runs"]:
            memory = run["peak_memory_bytes"]
            failed = f" ({run['failed']} failed)" if run["failed"] else ""
            lines.append(
                f"| {result['name']} | {run['load_name']} | {run['requests']}{failed} | "
                f"{run['output_tokens_per_s']:.1f} | "
                f"{shown_ms(run['ttft_ms'], 'p50')} / {shown_ms(run['ttft_ms'], 'p99')} ms | "
                f"{shown_ms(run['tpot_ms'], 'p50')} / {shown_ms(run['tpot_ms'], 'p99')} ms | "
                f"{attained(run, bounds):.0%} | {'-' if memory is None else f'{memory / 1e6:,.0f} MB'} |"
            )
    settings = [
        f"{r['name']}: {' '.join(f'{k}={v}' for k, v in r['settings'].items())}" for r in results if r["settings"]
    ]
    return "\n".join([*lines, "", *(["Settings. " + "; ".join(settings) + "."] if settings else [])]).rstrip() + "\n"
