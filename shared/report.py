"""Turn the outcomes of requests into figures, a table and a results file.

It knows neither servers nor engines: whoever measured hands it outcomes and says what was measured.

    Outcomes -> summarise -> one run -> table row; all runs -> results/*.json, *.png, one line of JSON
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import SetupError
from shared.load_client import Outcome

RESULTS = Path(__file__).resolve().parent.parent / "results"
PERCENTILES = (50, 90, 99)
BUSY = 0.2  # a larger share of the processor in other hands distorts what is measured

Run = dict[str, Any]
Result = dict[str, Any]


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99 in ms, with linear interpolation between the two nearest values. None if there are no values."""
    if not seconds:
        return None
    return {f"p{q}": round(float(np.percentile(seconds, q)) * 1000, 3) for q in PERCENTILES}


def summarise(load: dict[str, Any], outcomes: Sequence[Outcome], seconds: float, peak_memory: int | None = None) -> Run:
    """One run's figures. Failed requests are counted with their reasons, and are in no other figure.

    load: what names the run, such as {"load": "closed", "concurrency": 4}.
    seconds: from the beginning to the last answer.
    peak_memory: bytes, or None if it can't be known.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    failures = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.completion_tokens for outcome in good)
    return {
        **load,
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "failures": dict(failures.most_common()),
        "seconds": round(seconds, 3),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": round(output_tokens / seconds, 3),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / seconds, 3),
        "requests_per_s": round(len(good) / seconds, 4),
        "ttft_ms": percentiles([outcome.ttft_s for outcome in good if outcome.ttft_s is not None]),
        "tpot_ms": percentiles([outcome.tpot_s for outcome in good if outcome.tpot_s is not None]),
        "e2e_ms": percentiles([outcome.e2e_s for outcome in good]),
        "peak_memory_bytes": peak_memory,
        "each": [
            {
                "ttft_ms": None if outcome.ttft_s is None else round(outcome.ttft_s * 1000, 3),
                "e2e_ms": round(outcome.e2e_s * 1000, 3),
                "prompt_tokens": outcome.prompt_tokens,
                "output_tokens": outcome.completion_tokens,
            }
            for outcome in good
        ],
    }


# --- what a person reads ----------------------------------------------------------------------------------------------


def heading(result: Result) -> str:
    """What is measured, on what, and the limits it is held against."""
    machine, limits = result["machine"], result["limits"]
    settings = ", ".join(f"{name}={value}" for name, value in result["settings"].items())
    cores = ", ".join(f"{machine[k]} {k[:-1] if machine[k] == 1 else k}" for k in ("cores", "threads"))
    lines = [
        f"{result['name']}, {result['benchmark']}: {result['model']}" + (f" ({settings})" if settings else ""),
        f"machine  {machine['processor']}, {cores}" + (f", {machine['gpu']}" if "gpu" in machine else ""),
        f"         {machine['platform']}, Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, {machine['date']}",
    ]
    if result["busy_share"] > BUSY:
        lines.append(
            f"warning  other programs take {result['busy_share']:.0%} of the processor: all figures will be low"
        )
    if limits is None:
        return "\n".join(
            [*lines, "limits   unknown: the machine above is the client's, and the server may be on another"]
        )
    return "\n".join(
        [
            *lines,
            f"model    {result['weights'] / 1e6:.1f} M weights, {result['dtype']} on {result['device']}",
            f"decode   at most {limits['decode_tokens_per_s']:.1f} tokens/s at batch 1: "
            f"{limits['bandwidth'] / 1e9:.1f} GB/s of bandwidth / {limits['weight_bytes'] / 1e6:.0f} MB of weights",
            f"prefill  at most {limits['prefill_tokens_per_s']:.0f} tokens/s: {limits['flops'] / 1e9:.0f} GFLOP/s / "
            f"(2 x {result['weights'] / 1e6:.1f} M weights)",
        ]
    )


WIDTHS = (8, 9, 9, 7, 20, 17, 16, 6)


def _columns(first: str, *others: str) -> str:
    return " ".join([first.ljust(22), *(cell.rjust(width) for cell, width in zip(others, WIDTHS, strict=True))])


TABLE_HEAD = "\n".join(
    (
        _columns("", "", "output", "all", "", "TTFT ms", "TPOT ms", "end to end s", "peak"),
        _columns("load", "ok/sent", "tokens/s", "tokens/s", "req/s", *["p50/p90/p99"] * 3, "MB"),
    )
)


def table_row(run: Run) -> str:
    """One run, in the columns of TABLE_HEAD."""
    return _columns(
        run_name(run),
        f"{run['requests'] - run['failed']}/{run['requests']}",
        f"{run['output_tokens_per_s']:.1f}",
        f"{run['total_tokens_per_s']:.1f}",
        f"{run['requests_per_s']:.2f}",
        _triple(run["ttft_ms"]),
        _triple(run["tpot_ms"]),
        _triple(run["e2e_ms"], 1000),
        "-" if run["peak_memory_bytes"] is None else f"{run['peak_memory_bytes'] / 1e6:.0f}",
    )


def run_name(run: Run) -> str:
    details = {"concurrency": "{} at a time", "rate": "{:g}/s", "batch_size": "of {}"}
    return " ".join([run["load"], *(text.format(run[key]) for key, text in details.items() if key in run)])


def _triple(values: dict[str, float] | None, unit: float = 1) -> str:
    """The three percentiles, each with three digits or more, in `unit`s."""
    if values is None:
        return "-"
    numbers = [value / unit for value in values.values()]
    return "/".join(f"{x:.{2 if x < 9.995 else 1 if x < 99.95 else 0}f}" for x in numbers)


def remarks(result: Result) -> list[str]:
    """What the table doesn't say: why requests failed, and how far one request alone is from the limits."""
    lines = [
        f"{run_name(run)}: {count} failed: {reason}"
        for run in result["runs"]
        for reason, count in run["failures"].items()
    ]
    limits, alone = result["limits"], [run for run in result["runs"] if run.get("concurrency") == 1 and run["tpot_ms"]]
    if limits is not None and alone:
        run = alone[0]
        prefill = run["prompt_tokens"] / (run["requests"] - run["failed"]) / run["ttft_ms"]["p50"] * 1000
        for phase, speed in (("decode", 1000 / run["tpot_ms"]["p50"]), ("prefill", prefill)):
            limit = limits[f"{phase}_tokens_per_s"]
            lines.append(
                f"{phase} of one request: {speed:.1f} tokens/s, {speed / limit:.0%} of the limit of {limit:.1f}"
            )
    return lines


# --- what a program reads ---------------------------------------------------------------------------------------------


def save(result: Result, path: Path) -> None:
    """Write `result` as JSON, each request's times included, whole or not at all. Raises SetupError if it can't."""
    written = path.with_suffix(".tmp")
    try:
        written.write_text(json.dumps(result, indent=1) + "\n")
        written.replace(path)
    except OSError as error:
        raise SetupError(f"{path} can't be written: {error.strerror}") from None


def one_line(result: Result) -> str:
    """`result` as one line of JSON, without the times of each request."""
    runs = [{key: value for key, value in run.items() if key != "each"} for run in result["runs"]]
    return json.dumps({**result, "runs": runs})
