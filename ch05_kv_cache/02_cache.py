"""The cache step by step: where keys and values are stored, and that the answer is the same as without.

A token's key and value depend on the tokens before it only. So they stay right when tokens are added, and attention of
a new token needs nothing else of the old ones.

    python 02_cache.py: prompt -> prefill -> decode, decode, ...; each step's logits against a full recomputation
"""

import torch

from ch05_kv_cache.engine import KVCache, KVCacheEngine
from shared.model import causal_attend

PROMPT = "The capital of France is"
STEPS = 8


def main() -> None:
    engine = KVCacheEngine()
    token_ids = engine.encode_prompt(PROMPT)
    cache = KVCache(engine.model.config, 1, len(token_ids) + STEPS, torch.float32, torch.device("cpu"))
    L, B, KV, S, D = cache.keys.shape
    print(f"\nOne preallocated tensor for the keys, one for the values, [L, B, KV, S, D] = [{L}, {B}, {KV}, {S}, {D}]:")
    print(f"{cache.keys.nbytes / 1e3:.0f} kB each, room for {S} tokens. # is a token that is stored:\n")
    print("   phase    cache                tokens computed   largest difference    same next")
    print("                                 cached / without  of the logits         token")
    new = token_ids
    for step in range(STEPS):
        logits = engine.model.logits(engine.forward(new, [0], [len(new)], cache)[-1:])[0]  # [V]
        expected = recomputed(engine, token_ids)
        difference = (logits - expected).abs().max().item()
        same = bool(logits.argmax() == expected.argmax())
        print(
            f"   {'decode ' if step else 'prefill'}  {picture(cache):<20} {len(new):>6} / {len(token_ids):<9}"
            f"  {difference:<20.1e}  {'yes' if same else 'NO'}"
        )
        new = [int(logits.argmax())]
        token_ids = token_ids + new
    print(f"\n   {engine.tokenizer.decode(token_ids)!r}")
    print("\n   The differences are float32's rounding: sums of the same numbers in another order.")


def recomputed(engine: KVCacheEngine, token_ids: list[int]) -> torch.Tensor:
    """Logits [V] after the sequence, computed whole, with nothing kept: what chapter 1 does at each step."""
    hidden = engine.model(torch.tensor(token_ids), torch.arange(len(token_ids)), causal_attend)
    return engine.model.logits(hidden[-1:])[0]


def picture(cache: KVCache) -> str:
    return "#" * cache.lengths[0] + "." * (cache.keys.shape[3] - cache.lengths[0])


if __name__ == "__main__":
    main()
