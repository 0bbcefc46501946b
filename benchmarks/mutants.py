"""Change the source text of lockstep in one place after another, and see that the daily tests notice each change.

    python benchmarks/mutants.py
    python benchmarks/mutants.py --only 'tree*' --only '*best*'

Each mutant is a copy of `src` with one replaced text. The tests that concern it run on the copy, without the slow ones.
The exit status is 1 if a mutant passes its tests, which is a gap in them, or if its text is not found exactly once. The
laws have mutants of their own in `tests/laws/test_mutants.py`, which replace functions in the running process.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: The module, below `src/lockstep`.
        text: What is replaced; it occurs exactly once.
        by: What it is replaced by.
        tests: The files that must notice it, below `tests`.
    """

    file: str
    text: str
    by: str
    tests: tuple[str, ...]


MUTANTS = {
    "tree: shards of another device are merged early": Mutant(
        "tree.py",
        "if not begins_here or height >= subtree_height(right, following):",
        "if height >= subtree_height(right, following):",
        ("test_tree.py",),
    ),
    "tree: the distance of two shards instead of their subtree": Mutant(
        "tree.py", "return (left ^ right).bit_length()", "return (right - left).bit_length()", ("test_tree.py",)
    ),
    "plan: the last shards are longer": Mutant(
        "plan.py", "size + (shard < longer)", "size + (shard >= num_shards - longer)", ("test_plan.py",)
    ),
    "streams: a seed loses its upper bits": Mutant(
        "streams/seeds.py", "for mask in (key >> 32, 0):", "for mask in (0, 0):", ("streams/test_seeds.py",)
    ),
    "scales: the factor grows an update late": Mutant(
        "precision/scales.py",
        "if self.finite_updates + 1 < self.interval:",
        "if self.finite_updates < self.interval:",
        ("precision/test_scales.py",),
    ),
    "scales: no smallest factor": Mutant(
        "precision/scales.py",
        "factor=max(lower, self.minimum), finite_updates=-self.uncounted",
        "factor=lower, finite_updates=-self.uncounted",
        ("precision/test_scales.py",),
    ),
    "retry: the scale at its lower bound is tried again": Mutant(
        "updaters/step/retry.py",
        "lower.factor >= scale.factor",
        "lower.factor > scale.factor",
        ("updaters/test_overflow.py",),
    ),
    "retry: the next batch is the same one": Mutant(
        "updaters/step/retry.py",
        "skipped_batches=attempt.consumed_batches if draws_next else attempt.skipped_batches",
        "skipped_batches=attempt.skipped_batches",
        ("updaters/test_overflow.py",),
    ),
    "metrics: a mean of means": Mutant(
        "metrics/average.py",
        "return Mean(self.total + other.total, self.weight + other.weight)",
        "return Mean(self.total * other.weight + other.total * self.weight, self.weight * other.weight)",
        ("metrics/test_metrics.py",),
    ),
    "snapshots: the name of a folder is not durable": Mutant(
        "snapshots/commit.py",
        "    disk.sync_folder(final.parent)\n    return manifest\n",
        "    return manifest\n",
        ("snapshots/test_crash_states.py", "snapshots/test_io_errors.py"),
    ),
    "snapshots: one too many is kept": Mutant(
        "snapshots/writer.py",
        "*ordered[-self.keep :]",
        "*ordered[-self.keep - 1 :]",
        ("extensions/test_snapshot.py", "snapshots/test_writer.py"),
    ),
    "snapshots: of equal values the last one is the best": Mutant(
        "snapshots/writer.py",
        'return value > than[self.best] if self.mode == "max"',
        'return value >= than[self.best] if self.mode == "max"',
        ("extensions/test_snapshot.py",),
    ),
    "triggers: a resumed run counts its periods anew": Mutant(
        "triggers/times.py",
        "        if self._previous is None:\n            self._previous = position(progress, self.unit)",
        "        self._previous = 0",
        ("triggers/test_trigger_table.py",),
    ),
    "optim: the velocity is not rescaled with the learning rate": Mutant(
        "optim/momentum_sgd.py",
        "rescaled = momentum * (lr / old_lr)",
        "rescaled = momentum",
        ("optim/test_momentum_sgd.py", "laws/test_momentum_correction.py"),
    ),
    "data: an epoch that ends with its batch is not over": Mutant(
        "data/cursor.py",
        "while missing >= len(cursor.order) - cursor.position:",
        "while missing > len(cursor.order) - cursor.position:",
        ("data/test_batch_iterator.py",),
    ),
    "communicators: a value that only other ranks have is no difference": Mutant(
        "communicators/comparison.py",
        "for name in {**first, **here} if first",
        "for name in first if first",
        ("communicators/test_comparison.py", "communicators/test_comparison_and_packing.py"),
    ),
    "communicators: a single process sums only the first of its partial sums": Mutant(
        "communicators/local.py",
        "return total(partials) if partials",
        "return list(partials[0].tensors) if partials",
        ("communicators/test_process.py", "communicators/sums"),
    ),
    "replicas: buffers go from shard to shard": Mutant(
        "replicas/buffers/replica_buffers.py",
        "torch._foreach_copy_([own for own, _ in alike], [start for _, start in alike])",
        "pass",
        ("replicas/buffers/test_replica_buffers.py",),
    ),
    "updaters: a trained tensor outside of the model is accepted": Mutant(
        "replicas/passes/leaks.py",
        "if owner is None or owner.training]",
        "if owner is not None and owner.training]",
        ("updaters/test_leaks.py",),
    ),
    "updaters: each shard has the gradient of the first one": Mutant(
        "updaters/gathering.py",
        "gradient[samples.start : samples.stop : samples.step]",
        "gradient[: len(samples)]",
        ("updaters/test_batch_loss.py",),
    ),
    "replicas: copies of the weights stay as they were": Mutant(
        "replicas/pool/replica_set.py",
        "            self.sync_parameters()\n        return False\n",
        "            pass\n        return False\n",
        ("replicas/pool/test_copies.py",),
    ),
    "replicas: partial sums that are to be kept are added to": Mutant(
        "replicas/passes/summing.py",
        "        if keep:\n            partials = [",
        "        if not keep:\n            partials = [",
        ("replicas/passes/test_summing.py",),
    ),
    "optim: a fused step takes gradients as they lie": Mutant(
        "optim/momentum.py",
        "laid_out_for(weight, _materialized(grad)) for weight, grad",
        "_materialized(grad) for weight, grad",
        ("optim/test_momentum_sgd.py",),
    ),
    "streams: an operator's generator is looked for in the wrong place": Mutant(
        "streams/override.py",
        "return next((index for index, each in enumerate(arguments)",
        "return next((index + 1 for index, each in enumerate(arguments)",
        ("streams/test_operators.py",),
    ),
    "tuning: the global generators move on": Mutant(
        "tuning/restored.py",
        "        with restored_generators():\n            yield state\n",
        "        yield state\n",
        ("tuning/test_batch_size_finder.py", "tuning/test_lr_finder.py"),
    ),
    "launch: the store listens on all interfaces": Mutant(
        "communicators/joining.py",
        "socket.create_server((address, port),",
        'socket.create_server(("", port),',
        ("launch/test_listening.py",),
    ),
    "launch: torch chooses the interface": Mutant(
        "communicators/environment.py",
        "        variables.setdefault(name, loopback)\n",
        "        pass\n",
        ("launch/test_listening.py",),
    ),
    "communicators: the transport adds what ranks have in several nodes": Mutant(
        "communicators/sums/planning.py",
        "and all(len(each.shards) == 1 for each in contributions)",
        "and len(contributions[0].shards) == len(contributions[1].shards)",
        ("communicators/sums/test_ordered_sum.py",),
    ),
    "verify: forks draw what their parent would draw": Mutant(
        "verify/host.py",
        "    random.seed()\n",
        "    random.seed(0)\n",
        ("verify/test_sins.py",),
    ),
    "extensions: the average moves the wrong way": Mutant(
        "extensions/averages.py",
        "exact.lerp_(weight, 1 - self.decay)",
        "exact.lerp_(weight, self.decay)",
        ("extensions/test_exponential_moving_average.py",),
    ),
}


def is_caught(mutant: Mutant) -> bool:
    """Run the tests of a mutant on a copy of the source; return whether one failed."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        module = source / "lockstep" / mutant.file
        text = module.read_text()
        if text.count(mutant.text) != 1:
            sys.exit(
                f"The text must occur once in {mutant.file}, but occurs {text.count(mutant.text)} times: {mutant.text}"
            )
        module.write_text(text.replace(mutant.text, mutant.by))
        environment = {**os.environ, "PYTHONPATH": str(source)}
        tests = [str(ROOT / "tests" / each) for each in mutant.tests]
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "--no-header", "--tb=no", *tests]
        done = subprocess.run(  # noqa: S603 - pytest
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode not in {0, 1}:
        sys.exit(f"The tests must run on a mutant of {mutant.file}, got exit status {done.returncode}:\n{done.stdout}")
    return done.returncode == 1


def main() -> None:
    """Run all mutants, or those that are asked for, and list which were caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="run the mutants of these names")
    patterns = parser.parse_args().only or ["*"]
    names = [name for name in MUTANTS if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    survived = []
    for name in names:
        begin = time.monotonic()
        caught = is_caught(MUTANTS[name])
        survived += [] if caught else [name]
        print(f"{'caught  ' if caught else 'SURVIVED'} {time.monotonic() - begin:5.1f} s  {name}", flush=True)
    print(f"{len(names) - len(survived)} of {len(names)} mutants were caught.")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
