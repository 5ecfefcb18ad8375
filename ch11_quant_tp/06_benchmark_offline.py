"""Measure chapter 11's engine in this process; `--peer transformers` measures transformers' own cache beside it.

python 06_benchmark_offline.py [--help] -> Engine -> table, results/ch11_quant_tp-offline.json
"""

from pathlib import Path

from ch11_quant_tp.engine import Engine
from shared.benchmark import offline
from shared.workload import WorkloadConfig

CONFIG = WorkloadConfig(requests=16, prompt_tokens=64, output_tokens=32)

if __name__ == "__main__":
    offline(Path(__file__).resolve().parent, Engine, CONFIG, batch_sizes=(1, 8, 32))
