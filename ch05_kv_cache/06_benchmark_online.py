"""Measure chapter 5's server over HTTP: a batch, closed loops and realistic traffic.

python 06_benchmark_online.py [--help] -> 05_server.py as a process -> table, results/ch05_kv_cache-online.json
"""

from pathlib import Path

from shared.benchmark import online
from shared.workload import WorkloadConfig

CONFIG = WorkloadConfig(requests=16, concurrency=(1, 2, 4, 8), prompt_tokens=32, output_tokens=16, rate=1.0)

if __name__ == "__main__":
    online(Path(__file__).resolve().parent, CONFIG)
