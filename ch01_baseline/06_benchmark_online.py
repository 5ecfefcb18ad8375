"""Measure chapter 1's server over HTTP: a batch, closed loops and realistic traffic, in under three minutes.

The loads are small: this engine computes the whole sequence again for each token, one request at a time.

    python 06_benchmark_online.py [--help] -> 05_server.py as a process -> table, results/ch01_baseline-online.json
"""

from pathlib import Path

from shared.benchmark import online
from shared.workload import WorkloadConfig

CONFIG = WorkloadConfig(
    requests=8,
    concurrency=(1, 2, 4),
    prompt_tokens=16,
    output_tokens=8,
    rate=0.5,
    system_tokens=16,
)

if __name__ == "__main__":
    online(Path(__file__).resolve().parent, CONFIG)
