"""The forward and backward passes of shards, and the sum of their gradients."""

from lockstep.replicas.passes.forward_backward import (
    Backward as Backward,
    Forward as Forward,
    ForwardBackward as ForwardBackward,
    shards_of_batch as shards_of_batch,
)
from lockstep.replicas.passes.leaks import (
    check_leaves as check_leaves,
    check_no_accumulate_hooks as check_no_accumulate_hooks,
    check_no_inner_backward as check_no_inner_backward,
    check_no_leaked_gradients as check_no_leaked_gradients,
    foreign_leaves as foreign_leaves,
)
from lockstep.replicas.passes.means import why_no_mean as why_no_mean
from lockstep.replicas.passes.parameter_writes import refusing_writes as refusing_writes
from lockstep.replicas.passes.shard_runner import ShardRunner as ShardRunner, create_runners as create_runners
from lockstep.replicas.passes.shard_streams import ShardStreams as ShardStreams
from lockstep.replicas.passes.summing import (
    TreeSum as TreeSum,
    apply_tensor_hooks as apply_tensor_hooks,
    finish_whole as finish_whole,
    move_partials as move_partials,
)
from lockstep.replicas.passes.tasks import ShardHooks as ShardHooks, in_mode as in_mode
