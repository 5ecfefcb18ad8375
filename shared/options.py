"""The benchmarks' command lines. Each option is checked here, before anything is started; none is taken in vain.

argv + the chapter's WorkloadConfig -> argparse -> Namespace, WorkloadConfig
"""

import argparse
import os
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from shared.report import RESULTS
from shared.workload import WorkloadConfig

ONLY_WITH_LOAD = {
    "concurrency": "closed",
    **dict.fromkeys(("rate", "shared_prefix", "system_tokens", "multi_turn", "think_time"), "realistic"),
}


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong option gets one line, without the list of all options before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def parse_online(chapter: str, config: WorkloadConfig, argv: Sequence[str] | None) -> tuple[Namespace, WorkloadConfig]:
    """The options of the online benchmark, and the chapter's traffic with what they change."""
    parser = Parser(description=f"Measure {chapter}'s server over HTTP.", allow_abbrev=False)
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", type=base_url, help="measure this running OpenAI-compatible server instead")
    group.add_argument("--model", help="its model (default: the first that it names)")
    group.add_argument("--api-key", help="its key")
    group.add_argument("--port", type=port, help="port of the chapter's server (default: a free one)")
    group.add_argument("--startup-timeout", type=seconds, metavar="S", help="for it to get ready (default: 120)")
    group = add_traffic(parser, config)
    group.add_argument("--load", choices=["batch", "closed", "realistic", "all"], default="all", help="default: all")
    add(group, config, "concurrency", integers, "N,N,...", "clients of the closed loops, one loop each")
    add(group, config, "rate", float, "PER_S", "realistic: conversations that begin a second; later turns come on top")
    add(group, config, "shared_prefix", float, "SHARE", "realistic: share with one common system prompt")
    add(group, config, "system_tokens", int, "N", "realistic: length of that prompt")
    add(group, config, "multi_turn", float, "SHARE", "realistic: share with more than one turn")
    add(group, config, "think_time", float, "S", "realistic: mean time between an answer and the next turn")
    group.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="for each request (default: 600)")
    args = parser.parse_args(argv)

    wrong = ("port", "startup_timeout") if args.base_url else ("model", "api_key")
    for name in wrong:
        if getattr(args, name) is not None:
            parser.error(f"--{flag(name)} can't be used {'with' if args.base_url else 'without'} --base-url")
    for name, load in ONLY_WITH_LOAD.items():
        if getattr(args, name) is not None and args.load not in (load, "all"):
            parser.error(f"--{flag(name)} has no effect on --load {args.load}: it belongs to --load {load}")
    args.startup_timeout = args.startup_timeout or 120.0
    return finished(parser, args, config, f"{'external' if args.base_url else chapter}-online")


def parse_offline(
    chapter: str, config: WorkloadConfig, batch_sizes: Sequence[int], argv: Sequence[str] | None
) -> tuple[Namespace, WorkloadConfig]:
    """The options of the offline benchmark, and the chapter's traffic with what they change."""
    parser = Parser(description=f"Measure {chapter}'s engine in this process.", allow_abbrev=False)
    group = add_traffic(parser, config)
    group.add_argument(
        "--batch-sizes", type=integers, default=tuple(batch_sizes), metavar="N,N,...",
        help=f"prompts that generate_batch gets at once (default: {shown(batch_sizes)})",
    )  # fmt: skip
    group.add_argument("--threads", type=positive, metavar="N", help="threads of torch (default: what torch chooses)")
    parser.add_argument(
        "--peer", choices=["transformers"], help="run each batch through transformers' generate and its cache as well"
    )
    return finished(parser, parser.parse_args(argv), config, f"{chapter}-offline")


def add_traffic(parser: Parser, config: WorkloadConfig) -> Any:
    """The options that both benchmarks have."""
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="results; a picture is put beside it")
    group = parser.add_argument_group("traffic")
    add(group, config, "requests", int, "N", "requests of each load; a closed loop sends at least two a client")
    add(group, config, "prompt_tokens", int, "N", "length of the prompts, about; the median in realistic traffic")
    add(group, config, "output_tokens", int, "N", "length of the answers; the median in realistic traffic")
    add(group, config, "seed", int, "N", "another one makes other prompts, unknown to a server's prefix cache")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="answers of exactly the length asked for (default: yes)",
    )  # fmt: skip
    group.add_argument("--warmup", type=natural, default=2, metavar="N", help="requests before, uncounted (default: 2)")
    return group


def add(group: Any, config: WorkloadConfig, name: str, kind: Any, metavar: str, text: str) -> None:
    """An option that replaces a field of the chapter's WorkloadConfig."""
    text = f"{text} (default: {shown(getattr(config, name))})"
    group.add_argument(f"--{flag(name)}", type=kind, metavar=metavar, help=text)


def finished(parser: Parser, args: Namespace, config: WorkloadConfig, stem: str) -> tuple[Namespace, WorkloadConfig]:
    """Put the options into `config`, check it, and make sure now that the results can be written in the end."""
    given = {f.name: value for f in fields(config) if (value := getattr(args, f.name, None)) is not None}
    try:
        config = replace(config, **given)
    except ValueError as error:
        parser.error(f"--{error}")
    for field in fields(config):
        setattr(args, field.name, getattr(config, field.name))
    args.output = args.output or RESULTS / f"{stem}.json"
    if args.output.suffix != ".json":
        parser.error(f"--output {args.output}: the name must end in .json")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {args.output}: {error.strerror}")
    if args.output.is_dir() or not os.access(args.output.parent, os.W_OK):
        parser.error(f"--output {args.output}: can't be written")
    return args, config


def flag(name: str) -> str:
    return name.replace("_", "-")


def shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# --- types of options; argparse puts the option's name before what they say -------------------------------------------


def positive(text: str) -> int:
    return _number(text, int, 1)


def natural(text: str) -> int:
    return _number(text, int, 0)


def integers(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def port(text: str) -> int:
    value = _number(text, int, 1)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: they go from 1 to 65535")
    return value


def seconds(text: str) -> float:
    return _number(text, float, 0.001)


def base_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} must begin with http:// or https://")
    text = text.rstrip("/")
    return text if re.search(r"/v\d+$", text) else f"{text}/v1"  # OpenVINO's server has its API at /v3


def _number(text: str, kind: Any, least: float) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text} must be {'an integer' if kind is int else 'a number'} of at least {least}"
        )
    return value
