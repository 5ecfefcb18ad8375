"""Measure chapter 10's engine in this process; `--peer transformers` measures transformers' own cache beside it.

python 06_benchmark_offline.py [--help] -> PagedEngine -> table, results/ch10_paged_cache-offline.json
"""

from pathlib import Path

from ch10_paged_cache.engine import PagedEngine
from shared.benchmark import offline
from shared.workload import WorkloadConfig

CONFIG = WorkloadConfig(requests=16, prompt_tokens=64, output_tokens=32)

if __name__ == "__main__":
    offline(Path(__file__).resolve().parent, PagedEngine, CONFIG, batch_sizes=(1, 8, 32))
