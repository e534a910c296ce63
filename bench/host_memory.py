"""Peak memory of a host's process as its shard grows and shrinks: no process may hold a whole array.

One process a host over loopback, 8 simulated devices in all; every row is a run of its own, of one case.
`python bench/host_memory.py [batch …]` (default 1 16)
"""

import sys

from conformance.case_text import parse_case
from conformance.devices import Devices
from conformance.hosts.launch import run_on_hosts

TARGET = "conformance.targets.bundled:halo"
NUM_DEVICES = 8
SEQ_LEN, HEAD_DIM = 2048, 256
HOSTS = (1, 2, 4)


def main(batches: list[int]) -> None:
    """Prints a table: MiB of one array's rows on a host, and of the largest process."""
    print("| batch | hosts | query's shard, a host | peak of the largest process | status |")
    print("| --- | --- | --- | --- | --- |")
    for batch in batches:
        case = parse_case(
            f"v=1 batch={batch} seq_len={SEQ_LEN} head_dim={HEAD_DIM} sliding_window_size=128 "
            f"context_parallelism={NUM_DEVICES} seed=1"
        )
        for hosts in HOSTS:
            done = run_on_hosts(TARGET, (case,), Devices("cpu", NUM_DEVICES // hosts), hosts, lambda line: None)
            shard = batch * SEQ_LEN * HEAD_DIM * 4 / hosts / 2**20
            peak = max(done.peak_bytes, default=0) / 2**20
            print(f"| {batch} | {hosts} | {shard:.0f} MiB | {peak:.0f} MiB | {done.results[0].status} |", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1, 16])
