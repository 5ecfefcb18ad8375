"""Draw results of the benchmarks, of one chapter or of several in one figure.

It knows the results files, the step traces and matplotlib, nothing else.

    python -m shared.plots results/a.json results/b.json -o figure.png
    results -> throughput and TTFT against concurrency, times of realistic traffic -> PNG

    python -m shared.plots trace.jsonl -o timeline.png
    step trace -> a row a request: waiting, prefill, decode -> PNG
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, no window

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from shared.options import Parser
from shared.trace import read_trace

# Okabe and Ito, "Color Universal Design" (2008), darkest first and without the yellow, which is pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"

Styled = list[tuple[dict[str, Any], dict[str, Any]]]  # each result with its colour and marker
Panel = Callable[[Axes, Styled], None]


def draw_load(results: list[dict[str, Any]], path: Path) -> None:
    """One figure of all `results` (as `shared.report.save` writes them), a colour and a marker each.

    A row of panels for each kind of load that was measured. Raises ValueError if there is nothing to draw.
    """
    rows = [panels for keys, panels in ROWS if any(runs_of(result, *keys) for result in results)]
    if not rows:
        raise ValueError("nothing to draw: all requests failed")
    draw_panels(results, rows, ", ".join(sorted({result["model"] for result in results})), path)


def draw_panels(results: Sequence[dict[str, Any]], rows: Sequence[tuple[Panel, Panel]], title: str, path: Path) -> None:
    """Rows of two panels, and below them a legend of all results, which have the same look in each."""
    n = len(COLOURS)
    styled: Styled = [
        (result, {"color": COLOURS[k % n], "marker": MARKERS[(k + k // n) % n], "markersize": 5})
        for k, result in enumerate(results)  # beyond n, each colour comes again with the next marker
    ]
    figure, axes = plt.subplots(len(rows), 2, figsize=(10, 3.8 * len(rows) + 0.6), squeeze=False, layout="constrained")
    for panels, pair in zip(rows, axes, strict=True):
        for panel, ax in zip(panels, pair, strict=True):
            panel(ax, styled)
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], label=result["name"], **style) for result, style in styled]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_comparison(
    results: Sequence[dict[str, Any]], share: Callable[[dict[str, Any]], float], within: str, title: str, path: Path
) -> None:
    """Closed loops and rising rates of several engines. share: of a run's requests that kept `within`, the bounds."""

    def draw_share(ax: Axes, styled: Styled) -> None:
        for result, style in styled:
            runs = runs_of(result, "realistic", "rate")
            ax.plot([run["rate"] for run in runs], [100 * share(run) for run in runs], **style)
        ax.set(title=f"Realistic traffic: within {within}", xlabel="conversations that begin a second")
        ax.set(ylabel="% of requests", ylim=(-3, 103))
        measured_ticks(ax)

    draw_panels(results, [(draw_throughput, draw_ttft), (draw_tpot, draw_share)], title, path)


def runs_of(result: dict[str, Any], load: str, key: str) -> list[dict[str, Any]]:
    """The runs of one kind of load, in the order of `key`, without those in which everything failed."""
    runs = (run for run in result["runs"] if run["load"] == load and run["failed"] < run["requests"])
    return sorted(runs, key=lambda run: run[key])


def draw_throughput(ax: Axes, styled: Styled, load: str = "closed", key: str = "concurrency") -> None:
    for result, style in styled:
        runs = runs_of(result, load, key)
        ax.plot([run[key] for run in runs], [run["output_tokens_per_s"] for run in runs], **style)
    ax.set(title="Closed loop: throughput", xlabel="concurrency (requests at a time)", ylabel="output tokens/s")
    ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
    measured_ticks(ax)


def draw_ttft(ax: Axes, styled: Styled) -> None:
    for result, style in styled:
        runs = [run for run in runs_of(result, "closed", "concurrency") if run["ttft_ms"]]
        for quantile, line in (("p50", "-"), ("p99", "--")):
            ttft_ms = [run["ttft_ms"][quantile] for run in runs]
            ax.plot([run["concurrency"] for run in runs], ttft_ms, linestyle=line, **style)
    ax.set(title="Closed loop: time to first token", xlabel="concurrency (requests at a time)", ylabel="TTFT (ms)")
    ax.set_yscale("log")  # chapters differ by orders of magnitude
    plain_ticks(ax.yaxis)
    measured_ticks(ax)
    median, p99 = (Line2D([], [], color="0.3", linestyle="-"), Line2D([], [], color="0.3", linestyle="--"))
    ax.legend([median, p99], ["median", "99th percentile"], frameon=False, loc="lower right")


def draw_tpot(ax: Axes, styled: Styled) -> None:
    for result, style in styled:
        runs = [run for run in runs_of(result, "closed", "concurrency") if run["tpot_ms"]]
        ax.plot([run["concurrency"] for run in runs], [run["tpot_ms"]["p50"] for run in runs], **style)
    ax.set(title="Closed loop: time per output token, median", xlabel="concurrency (requests at a time)")
    ax.set(ylabel="TPOT (ms)", yscale="log")
    plain_ticks(ax.yaxis)
    measured_ticks(ax)


def draw_batches(ax: Axes, styled: Styled) -> None:
    draw_throughput(ax, styled, "generate_batch", "batch_size")
    ax.set(title="generate_batch: throughput", xlabel="batch size (prompts)")


def draw_batch_time(ax: Axes, styled: Styled) -> None:
    for result, style in styled:
        runs = runs_of(result, "generate_batch", "batch_size")
        ax.plot([run["batch_size"] for run in runs], [run["e2e_ms"]["p50"] / 1000 for run in runs], **style)
    ax.set(title="generate_batch: time of a batch", xlabel="batch size (prompts)", ylabel="median time (s)")
    ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
    measured_ticks(ax)


def draw_shares(ax: Axes, styled: Styled, key: str, load: str, what: str) -> None:
    """The share of the requests whose time `key` was no longer than x: an empirical distribution function."""
    for result, style in styled:
        for run in runs_of(result, load, "requests"):
            seconds = [each[key] / 1000 for each in run["each"] if each[key] is not None]
            if seconds:
                ax.ecdf(seconds, color=style["color"])
    ax.set(title=what, xlabel="time from request to first token (s)", ylabel="share of requests", ylim=(0, 1.02))
    if key == "e2e_ms":
        ax.set_xlabel("time from request to last token (s)")
    ax.set_xscale("log")
    plain_ticks(ax.xaxis)


ROWS: tuple[tuple[tuple[str, str], tuple[Panel, Panel]], ...] = (
    (("closed", "concurrency"), (draw_throughput, draw_ttft)),
    (("generate_batch", "batch_size"), (draw_batches, draw_batch_time)),
    (
        ("batch", "requests"),
        (
            partial(draw_shares, key="ttft_ms", load="batch", what="All at once: time to first token"),
            partial(draw_shares, key="e2e_ms", load="batch", what="All at once: end to end"),
        ),
    ),
    (
        ("realistic", "requests"),
        (
            partial(draw_shares, key="ttft_ms", load="realistic", what="Realistic traffic: time to first token"),
            partial(draw_shares, key="e2e_ms", load="realistic", what="Realistic traffic: end to end"),
        ),
    ),
)


# --- timelines --------------------------------------------------------------------------------------------------------

PHASES = {"waiting": "#BBBBBB", "prefill": "#E69F00", "decode": "#0072B2"}
ENDS = {"done": "black", "aborted": "#CC79A7", "failed": "#D55E00"}

Span = tuple[float, float, str]  # from, to [s], one of PHASES, or one of ENDS at the moment of its end


def draw_rows(ax: Axes, rows: Sequence[Sequence[Span]]) -> None:
    """A row a request, the first at the top: a bar for each of its spans, and a mark where it ends."""
    for y, spans in enumerate(rows):
        for phase, colour in PHASES.items():
            bars = [(start, end - start) for start, end, kind in spans if kind == phase]
            ax.broken_barh(bars, (y - 0.4, 0.4 if phase == "waiting" else 0.8), facecolors=colour)
        for how, colour in ENDS.items():
            ax.vlines([end for _, end, kind in spans if kind == how], y - 0.4, y + 0.4, color=colour, linewidth=2)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set(xlabel="time (s)", ylabel="request")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[["top", "right"]].set_visible(False)


def phase_legend(figure: Figure, rows: Sequence[Sequence[Span]] = ()) -> None:
    """The colours of the phases, and of those ends that are in `rows`."""
    handles: list[Patch | Line2D] = [Patch(color=colour, label=phase) for phase, colour in PHASES.items()]
    kinds = {kind for spans in rows for _, _, kind in spans}
    mark = partial(Line2D, [], [], marker="|", markersize=10, markeredgewidth=2, ls="")
    handles += [mark(color=colour, label=how) for how, colour in ENDS.items() if how in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def trace_rows(steps: Sequence[dict[str, Any]]) -> list[list[Span]]:
    """The spans of each request of a step trace, in order of arrival; each choice (n > 1) has a row.

    A step that leaves it out counts as waiting, be it in the queue, after a preemption, or for room in the budget.
    A trace may begin in the middle: a request that came before it begins with it.
    """
    arrived = {request: at for step in steps for request, at in step["arrived"]}
    ended = {request: (at, how) for step in steps for request, at, how in step["ended"]}
    rows: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))  # request -> choice -> spans
    newest: dict[tuple[str, int], int] = {}  # the last step that each was in
    for number, step in enumerate(steps):
        for request, choice, _, phase in step["scheduled"]:
            row = rows[request][choice]
            start, end = step["t"], step["t"] + step["seconds"]
            if row and newest[request, choice] == number - 1:
                start = row[-1][1]  # nothing was left out between the two
                if row[-1][2] == phase:
                    start = row.pop()[0]
            else:
                row.append((row[-1][1] if row else arrived.setdefault(request, start), start, "waiting"))
            row.append((start, end, phase))
            newest[request, choice] = number
    for request, at in arrived.items():
        choices = rows[request] or {0: rows[request][0]}
        if request not in ended:
            continue
        end, how = ended[request]
        for row in choices.values():
            last = row[-1][1] if row else at
            if len(choices) == 1 and end > last:  # given up while it waited
                row.append((last, end, "waiting"))
                last = end
            row.append((last, last, how))
    return [rows[name][choice] for name in sorted(rows, key=arrived.__getitem__) for choice in sorted(rows[name])]


def draw_timeline(steps: Sequence[dict[str, Any]], path: Path) -> None:
    """A step trace, as `shared.trace.read_trace` gives it: its requests, and below them what each step was.

    Raises ValueError if it has no request.
    """
    rows = trace_rows(steps)
    if not rows:
        raise ValueError("nothing to draw: no request is in the trace")
    height = min(9.0, 1.0 + 0.16 * len(rows))  # inches; about what 50 rows need
    figure, (above, queues, tokens, times) = plt.subplots(
        4, 1, figsize=(10, height + 4.4), sharex=True, layout="constrained", height_ratios=(height, 1.2, 1.2, 1.2)
    )
    draw_rows(above, rows)
    above.set(xlabel="", title="What each request waited for and got")
    running, waiting = at_once(rows, {"prefill", "decode"}), at_once(rows, {"waiting"})
    queues.step(*running, where="post", color="black", label="running")
    queues.step(*waiting, where="post", color="#D55E00", linestyle="--", label="waiting")
    queues.set(ylabel="requests", ylim=(0, 1.4 * max([1, *running[1], *waiting[1]])))  # room for the legend
    queues.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    queues.legend(loc="upper left", ncols=2, frameon=False)
    prefill, decode = ([step[f"{phase}_tokens"] for step in steps] for phase in ("prefill", "decode"))
    lower = [min(pair) if pair[0] < pair[1] else 0 for pair in zip(prefill, decode, strict=True)]
    for values, phase in ((prefill, "prefill"), (decode, "decode"), (lower, "prefill")):  # the lower one is in front
        tokens.fill_between(*over_time(steps, values), color=PHASES[phase], linewidth=0)
    tokens.set_yscale("symlog", linthresh=1)  # one decode must be seen beside a chunk of 512
    tokens.set(ylabel="tokens\nin a step", ylim=(0, None))
    tokens.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    times.fill_between(*over_time(steps, [step["seconds"] for step in steps]), color="0.4", linewidth=0)
    times.set(xlabel="time (s)", ylabel="seconds\na step takes", ylim=(0, None))
    for ax in (queues, tokens, times):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.3)
    figure.align_ylabels()
    phase_legend(figure, rows)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def at_once(rows: Sequence[Sequence[Span]], phases: set[str]) -> tuple[list[float], list[float]]:
    """When the number of rows in one of `phases` changes, and what it is from then on."""
    spans = [span for row in rows for span in row if span[2] in phases]
    changes = np.array([(start, 1) for start, _, _ in spans] + [(end, -1) for _, end, _ in spans]).reshape(-1, 2)
    times, index = np.unique(changes[:, 0], return_inverse=True)
    counts = np.cumsum(np.bincount(index, weights=changes[:, 1]))
    return times.tolist(), counts.tolist()


def over_time(steps: Sequence[dict[str, Any]], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """x and y of a value that holds for the length of each step, and is 0 while there is none."""
    x: list[float] = []
    y: list[float] = []
    for step, value in zip(steps, values, strict=True):
        start, end = step["t"], step["t"] + step["seconds"]
        if x and start - x[-1] > 0.01:  # s; less is what passes between two steps, and would be a white line
            x += [x[-1], start]
            y += [0, 0]
        x += [start, end]
        y += [value, value]
    return x, y


# --- axes -------------------------------------------------------------------------------------------------------------


def measured_ticks(ax: Axes) -> None:
    """A logarithmic x axis whose ticks are the numbers that were measured."""
    measured = np.unique(np.concatenate([line.get_xdata() for line in ax.get_lines()]))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(measured.tolist()))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def plain_ticks(axis: Axis) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5, written out."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def main() -> None:
    parser = Parser(prog="python -m shared.plots", description="Draw results of one or more benchmarks in one figure.")
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json", help="or one step trace, TRACE.jsonl")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FIGURE.png")
    args = parser.parse_args()
    if any(path.suffix == ".jsonl" for path in args.results):
        main_trace(parser, args.results, args.output)
        return
    results = []
    for path in args.results:
        try:
            result = json.loads(path.read_text())
            results.append({key: result[key] for key in ("name", "model", "runs")})
        except OSError as error:
            parser.error(f"{path}: {error.strerror}")
        except (ValueError, LookupError, TypeError):
            parser.error(f"{path} is no results file of the benchmarks")
    try:
        draw_load(results, args.output)
    except (OSError, ValueError) as error:
        parser.error(f"{args.output}: {error}")


def main_trace(parser: Parser, traces: Sequence[Path], output: Path) -> None:
    """Draw the one step trace among the arguments, or end with a line that says what is wrong."""
    if len(traces) > 1:
        parser.error("a step trace (.jsonl) is drawn by itself: give one file")
    try:
        steps = read_trace(traces[0])
        trace_rows(steps)
    except OSError as error:
        parser.error(f"{traces[0]}: {error.strerror}")
    except (ValueError, LookupError, TypeError, AttributeError):
        parser.error(f"{traces[0]} is no step trace")
    try:
        draw_timeline(steps, output)
    except (OSError, ValueError) as error:
        parser.error(f"{output}: {error}")


if __name__ == "__main__":
    main()
