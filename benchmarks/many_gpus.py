"""Compute when the gradients of an update have been summed on many GPUs, in the order of the tree and by DDP.

It measures nothing: it prints the tables of docs/many-gpus.md from the constants below, each with its source.

    python benchmarks/many_gpus.py
    python benchmarks/many_gpus.py --bucket-mib 100 --shards 4
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Cluster:
    """A number of GPUs in machines of eight.

    Attributes:
        nodes: The number of machines.
        gpus: The number of GPUs per machine.
        nvlink: Bytes per second that a GPU sends to the others of its machine, while it receives as many. H100: 450e9
            by the data sheet, of which NCCL reaches 370e9 (github.com/NVIDIA/nccl-tests/issues/212, by its author).
        network: Bytes per second that a GPU sends to other machines. DGX H100: a ConnectX-7 of 400 Gbit/s per GPU
            (DGX H100 data sheet), of which 90 % are assumed.
        memory: Bytes per second that a kernel reads and writes. H100 SXM: 3.35e12 (data sheet), of which 80 % are
            assumed.
        latency: Seconds from the call of a collective to its first byte, once inside a machine and once between
            machines; both assumed.
    """

    nodes: int
    gpus: int = 8
    nvlink: float = 370e9
    network: float = 0.9 * 400e9 / 8
    memory: float = 0.8 * 3.35e12
    latency: tuple[float, float] = (20e-6, 50e-6)

    @property
    def size(self) -> int:
        """The number of GPUs."""
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Model:
    """A model, and how long its backward takes for the samples of one GPU.

    Attributes:
        name: The name in the tables.
        parameters: The number of parameters; gradients are float32.
        flops: The floating-point operations of backward for all samples of one GPU, twice those of forward.
        utilization: The assumed part of the 989e12 operations per second of an H100 in bfloat16 (data sheet, dense).
    """

    name: str
    parameters: float
    flops: float
    utilization: float

    @property
    def backward(self) -> float:
        """Seconds of backward for all samples of one GPU."""
        return self.flops / (self.utilization * 989e12)

    def buckets(self, bucket_bytes: float) -> list[float]:
        """Return the bytes of each bucket, in the order in which backward completes them."""
        whole, rest = divmod(4 * self.parameters, bucket_bytes)
        return [bucket_bytes] * int(whole) + [rest] * (rest > 0)


MODELS = (
    Model("ResNet-50, 128 images", 25.6e6, 128 * 2 * 8.2e9, 0.15),
    Model("transformer, 124 M, 16 x 1024 tokens", 124e6, 4 * 124e6 * 16 * 1024, 0.4),
    Model("transformer, 1.3 B, 8 x 1024 tokens", 1.3e9, 4 * 1.3e9 * 8 * 1024, 0.4),
)


def all_reduce(cluster: Cluster, size: float) -> float:
    """Return the seconds of a ring over all GPUs, which uses all network adapters of a machine side by side."""
    sent = 2 * (cluster.size - 1) / cluster.size * size
    inside = sent / cluster.nvlink
    if cluster.nodes == 1:
        return cluster.latency[0] + inside
    return cluster.latency[1] + max(inside, sent / (cluster.gpus * cluster.network))


def flat(cluster: Cluster, size: float) -> float:
    """Return the seconds of one all-to-all over all GPUs, the ordered sum, and one all-gather."""
    inside = (cluster.gpus - 1) / cluster.size * size / cluster.nvlink
    outside = (cluster.size - cluster.gpus) / cluster.size * size / cluster.network
    one_way = cluster.latency[cluster.nodes > 1] + max(inside, outside)
    return 2 * one_way + additions(cluster, cluster.size, size)


def in_two_steps(cluster: Cluster, size: float) -> float:
    """Return the seconds if each machine first sums its own gradients, which form one node of the tree."""
    inside = cluster.latency[0] + (cluster.gpus - 1) / cluster.gpus * size / cluster.nvlink
    part = size / cluster.gpus
    seconds = 2 * inside + additions(cluster, cluster.gpus, size)
    if cluster.nodes > 1:
        outside = cluster.latency[1] + (cluster.nodes - 1) / cluster.nodes * part / cluster.network
        seconds += 2 * outside + additions(cluster, cluster.nodes, part)
    return seconds


def additions(cluster: Cluster, terms: int, size: float) -> float:
    """Return the seconds in which the owner of a slice adds its terms: two are read and one is written each time."""
    return 3 * (terms - 1) * size / terms / cluster.memory


WAYS = {"DDP": all_reduce, "flat": flat, "two steps": in_two_steps}


@dataclass(frozen=True)
class Timeline:
    """When each bucket is ready and summed, in seconds from the beginning of backward."""

    ready: list[float]
    summed: list[float]

    @property
    def exposed(self) -> float:
        """Seconds from the end of backward to the last sum, for which the optimizer waits."""
        return self.summed[-1] - self.ready[-1]


def timeline(cluster: Cluster, model: Model, way: str, *, bucket_bytes: float, shards: int) -> Timeline:
    """Sum the buckets one after the other on a side stream, during the backward of the last shard of each GPU."""
    sizes = model.buckets(bucket_bytes)
    end = model.backward
    last = end / shards
    ready, summed, done, free = [], [], 0.0, 0.0
    for size in sizes:
        done += size
        ready.append(end - last + last * done / sum(sizes))
        free = max(free, ready[-1]) + WAYS[way](cluster, size)
        summed.append(free)
    return Timeline(ready, summed)


def table(cluster: Cluster, bucket_bytes: float, shards: int) -> list[str]:
    """Return the rows of one cluster."""
    names = list(WAYS) if cluster.nodes > 1 else ["DDP", "flat"]
    titles = ["model", "backward, ms", "buckets", *(f"{name}, ms" for name in names), "after backward, ms", "ratio"]
    rows = [f"| {' | '.join(titles)} |", "|---|" + "--:|" * (len(titles) - 1)]
    for model in MODELS:
        sizes = model.buckets(bucket_bytes)
        exposed = {
            name: timeline(cluster, model, name, bucket_bytes=bucket_bytes, shards=shards).exposed for name in names
        }
        late = sum(WAYS[names[-1]](cluster, size) for size in sizes)
        # Forward takes half as long as backward; the optimizer takes the same time in all.
        base = 1.5 * model.backward
        ratio = (base + exposed["DDP"]) / (base + exposed[names[-1]])
        figures = [
            f"{model.backward * 1e3:.1f}",
            str(len(sizes)),
            *(f"{exposed[name] * 1e3:.2f}" for name in names),
            f"{late * 1e3:.2f}",
            f"{ratio:.3f}",
        ]
        rows.append(f"| {model.name} | {' | '.join(figures)} |")
    return rows


def one_bucket(cluster: Cluster, size: float) -> list[str]:
    """Return the terms of the time of one bucket, with their numbers."""
    gpus, nodes, mega = cluster.gpus, cluster.nodes, size / 1e6
    ring = 2 * (cluster.size - 1) / cluster.size * mega
    found = [
        f"DDP: {ring:.1f} MB by a ring, {all_reduce(cluster, size) * 1e6:.0f} µs",
        (
            f"flat: twice {ring / 2:.1f} MB, and additions of {additions(cluster, cluster.size, size) * 1e6:.0f} µs: "
            f"{flat(cluster, size) * 1e6:.0f} µs"
        ),
    ]
    if nodes > 1:
        inside, outside = (gpus - 1) / gpus * mega, (nodes - 1) / nodes * mega / gpus
        adding = additions(cluster, gpus, size) + additions(cluster, nodes, size / gpus)
        found.append(
            f"two steps: twice {inside:.1f} MB inside and {outside:.1f} MB between machines, and additions of "
            f"{adding * 1e6:.0f} µs: {in_two_steps(cluster, size) * 1e6:.0f} µs"
        )
    return found


def bucket_times(cluster: Cluster, model: Model, bucket_bytes: float) -> list[str]:
    """Return when each bucket of a model is ready, and when it has been summed in either way."""
    names = ["DDP", "two steps" if cluster.nodes > 1 else "flat"]
    lines = [timeline(cluster, model, name, bucket_bytes=bucket_bytes, shards=1) for name in names]
    rows = [f"| bucket | ready, ms | summed by DDP, ms | in the tree's order, {names[1]}, ms |", "|--:|--:|--:|--:|"]
    for number, (ready, *summed) in enumerate(zip(lines[0].ready, *(each.summed for each in lines), strict=True), 1):
        rows.append(f"| {number} | {ready * 1e3:.2f} | " + " | ".join(f"{each * 1e3:.2f}" for each in summed) + " |")
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket-mib", type=float, default=25.0, help="the length of a bucket; DDP's default is 25")
    parser.add_argument("--shards", type=int, default=1, help="the shards of each GPU; only the last one's backward")
    options = parser.parse_args()
    size = options.bucket_mib * MIB
    for title, cluster in (("8 GPUs, NVLink", Cluster(1)), ("64 GPUs, InfiniBand", Cluster(8))):
        print(f"{title}, {options.shards} shard{'s' if options.shards > 1 else ''} per GPU\n")
        print("\n".join(table(cluster, size, options.shards)))
        print(f"\nOne bucket of {options.bucket_mib:g} MiB:")
        print("\n".join(f"* {line}" for line in one_bucket(cluster, size)), end="\n\n")
        print(f"{MODELS[0].name}, from the beginning of backward:\n")
        print("\n".join(bucket_times(cluster, MODELS[0], size)), end="\n\n")


if __name__ == "__main__":
    main()
