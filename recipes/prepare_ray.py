"""Prepare data on a Ray cluster: tasks write a share of the parts each, then one task merges them.

    python recipes/prepare_ray.py 64 SOURCE... --out PLACE --module llama3 --config debugmodel

The hosts share PLACE and the sources, folders or URLs. Ray repeats tasks that are killed; after a
failure, run the same command again, which writes only the missing parts.
"""

import subprocess
import sys

import ray

CORES_PER_TASK = 4


@ray.remote(num_cpus=CORES_PER_TASK, max_retries=5, retry_exceptions=False)
def prepare(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "torchtitan", "data", "prepare", *arguments]
    return subprocess.run([*command, "--workers", str(CORES_PER_TASK)]).returncode


def main() -> int:
    n_shares, arguments = int(sys.argv[1]), sys.argv[2:]
    ray.init()
    shares = [
        prepare.remote([*arguments, "--part", f"{i + 1}/{n_shares}"]) for i in range(n_shares)
    ]
    return max(ray.get(shares)) or ray.get(prepare.remote([*arguments, "--merge"]))


if __name__ == "__main__":
    sys.exit(main())
