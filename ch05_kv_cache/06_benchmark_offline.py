"""Measure chapter 5's engine in this process; `--peer transformers` measures transformers' own cache beside it.

python 06_benchmark_offline.py [--help] -> KVCacheEngine -> table, results/ch05_kv_cache-offline.json
"""

from pathlib import Path

from ch05_kv_cache.engine import KVCacheEngine
from shared.benchmark import offline
from shared.workload import WorkloadConfig

CONFIG = WorkloadConfig(requests=8, prompt_tokens=64, output_tokens=32)

if __name__ == "__main__":
    offline(Path(__file__).resolve().parent, KVCacheEngine, CONFIG, batch_sizes=(1, 8))
