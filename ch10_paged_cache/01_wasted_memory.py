"""What contiguous slots waste: bytes reserved, used and wasted on realistic traffic, against blocks of tokens.

python 01_wasted_memory.py: realistic workload -> tokens of each request -> shares of memory, requests that fit
"""

from pathlib import Path

import matplotlib.pyplot as plt

from ch05_kv_cache.engine import KVCache
from shared.checkpoint import checkpoint_folder
from shared.config import EngineConfig
from shared.model import ModelConfig
from shared.tokenizer import Tokenizer
from shared.workload import WorkloadConfig, realistic

MEMORY = 1e9  # bytes of cache
FIGURE = Path(__file__).resolve().parent.parent / "results" / "ch10-wasted-memory.png"


def lengths(tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """(prompt tokens, answer tokens) of each request of the benchmarks' realistic traffic."""
    found = []
    for conversation in realistic(WorkloadConfig(requests=200, prompt_tokens=64, output_tokens=64)).conversations:
        answers: list[str] = []
        for turn in conversation.turns:
            text = tokenizer.apply_chat_template(conversation.messages(answers))
            found.append((len(tokenizer.encode(text, add_special_tokens=False)), turn.max_tokens))
            answers.append("word " * turn.max_tokens)
    return found


def reserved(prompt: int, answer: int, block: int | None, max_len: int) -> tuple[float, float]:
    """Tokens (reserved, used) for one request, on average over its life: it grows from its prompt to its end."""
    stages = range(prompt, prompt + answer)
    used = sum(stages) / len(stages)
    if block is None:
        return max_len, used
    return sum(-(-tokens // block) * block for tokens in stages) / len(stages), used


def main() -> None:
    config = EngineConfig()
    folder = checkpoint_folder(config.model)
    model = ModelConfig.from_folder(folder)
    each = KVCache.bytes_per_token(model, config.torch_dtype())
    requests = lengths(Tokenizer(folder))
    mean_prompt, mean_answer = (sum(column) / len(requests) for column in zip(*requests, strict=True))
    print(f"{len(requests)} requests: prompts of {mean_prompt:.0f} tokens on average, answers of {mean_answer:.0f}.")
    print(f"A slot of chapter 9 has room for {model.max_model_len} tokens of {each:,} bytes.\n")
    print(f"Predict: how many such requests fit into {MEMORY / 1e9:.0f} GB at a time, in slots, and in blocks of 16?\n")
    longest = max(prompt + answer for prompt, answer in requests)
    schemes: dict[str, tuple[int | None, int]] = {
        f"slots of {model.max_model_len}": (None, model.max_model_len),
        f"slots of {longest}, the longest": (None, longest),
        **{f"blocks of {block}": (block, model.max_model_len) for block in (32, 16, 8)},
    }
    print(f"{'':<26} {'reserved':>10} {'used':>10} {'wasted':>8} {'requests fit':>13}")
    shares, fitting = {}, {}
    for name, (block, max_len) in schemes.items():
        pairs = [reserved(prompt, answer, block, max_len) for prompt, answer in requests]
        taken, used = sum(a for a, _ in pairs) / len(pairs) * each, sum(b for _, b in pairs) / len(pairs) * each
        shares[name], fitting[name] = used / taken, int(MEMORY / taken)
        print(f"{name:<26} {taken / 1e6:7.1f} MB {used / 1e6:7.1f} MB {1 - used / taken:8.1%} {fitting[name]:13}")
    print("\nIn blocks, only the last one of a sequence isn't full: half a block is wasted, whatever the length.")
    print("The paper (arXiv:2309.06180, section 1 and figure 2) found 20.4 to 38.2 % of the cache used in the systems")
    print("of its time, and over 96 % with blocks.")
    draw(shares, fitting)
    print(f"\nFigure: {FIGURE}")


def draw(shares: dict[str, float], fitting: dict[str, int]) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    figure, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
    names = list(shares)[::-1]
    used = [shares[name] for name in names]
    ax.barh(names, used, color="#0072B2", label="used")
    ax.barh(names, [1 - share for share in used], left=used, color="#D55E00", label="wasted")
    for y, name in enumerate(names):
        ax.text(1.01, y, f"{fitting[name]} requests in 1 GB", va="center")
    ax.set(xlabel="share of the reserved memory", xlim=(0, 1), title="Slots reserve what blocks leave to others")
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
