"""The chapters in the order of the course: what each adds, and how `make compare` starts it.

It knows folders and texts; it imports no chapter.

    CHAPTERS -> python -m shared.chapters -> the table in README.md, a CHANGES.md in each chapter
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- chapters: written by python -m shared.chapters -->", "<!-- end of chapters -->"


@dataclass(frozen=True)
class Chapter:
    """compare: the settings of its server in `make compare`, beside the user's own."""

    folder: str
    adds: str
    shows: str
    compare: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.split("_")[0]

    @property
    def number(self) -> int:
        return int(self.name.removeprefix("ch"))


# The last three get the same memory for their caches, 32,768 tokens: 16 slots of 2,048, or 2,048 blocks of 16.
CHAPTERS = (
    Chapter(
        "ch01_baseline",
        "the model behind an API: tokens, the forward pass, the autoregressive loop, streaming",
        "what an answer costs when each token recomputes the whole sequence",
    ),
    Chapter(
        "ch05_kv_cache",
        "our own model, with one seam; prefill and decode; a contiguous KV cache; static batches; whole conversations",
        "a token costs almost the same after 64 others as after 1,000",
    ),
    Chapter(
        "ch09_async_scheduling",
        "an engine loop apart from the HTTP handlers; continuous batching; chunked prefill; a step trace",
        "for 16 clients with equal requests, four times the tokens, the first one after a fourteenth of the time",
        {"MAX_NUM_SEQS": "16", "MAX_MODEL_LEN": "2048"},
    ),
    Chapter(
        "ch10_paged_cache",
        "blocks, block tables, prefix caching, copy on write, preemption; attention that reads blocks in place",
        "four times the requests running in the same 8,192 tokens of cache",
        {"MAX_NUM_SEQS": "32", "NUM_BLOCKS": "2048"},
    ),
    Chapter(
        "ch11_quant_tp",
        "weights of 8 and 4 bits and the kernel for them; an 8-bit cache; several ranks",
        "28 % of the bytes for the weights, and a token for one client in a third of the time",
        {"MAX_NUM_SEQS": "32", "NUM_BLOCKS": "2048", "QUANT": "int8", "DTYPE": "float32"},
    ),
)


def table() -> str:
    """The README's table of chapters, in Markdown."""
    rows = [f"| [{c.folder}]({c.folder}/README.md) | {c.adds} | {c.shows} |" for c in CHAPTERS]
    return "\n".join(["| chapter | what it adds | what it shows |", "|---|---|---|", *rows])


def with_table(readme: str) -> str:
    """README.md with the table between its two marks. Raises ValueError if one of them is missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {END if begin else BEGIN}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    from shared.changes import page

    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text()))
    for before, after in pairwise(CHAPTERS):
        (ROOT / after.folder / "CHANGES.md").write_text(page(before, after))


if __name__ == "__main__":
    main()
