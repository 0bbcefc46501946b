"""Splitting a batch into the inputs of shards, and merging the outputs and input gradients of shards."""

from lockstep.replicas.batch.input_gradients import (
    NO_GRADIENTS as NO_GRADIENTS,
    GradMode as GradMode,
    InputGradients as InputGradients,
    InputModes as InputModes,
    check_grad_mode as check_grad_mode,
    read_input_modes as read_input_modes,
)
from lockstep.replicas.batch.inputs import (
    BatchDim as BatchDim,
    DimNest as DimNest,
    Inputs as Inputs,
    ShardInputs as ShardInputs,
    argument_names as argument_names,
    check_dims as check_dims,
    count_samples as count_samples,
    dims_by_name as dims_by_name,
    dims_by_path as dims_by_path,
    longest_name as longest_name,
    named_inputs as named_inputs,
    number_positions as number_positions,
    positional_names as positional_names,
    positive_dims as positive_dims,
    read_inputs as read_inputs,
)
from lockstep.replicas.batch.outputs import (
    Outputs as Outputs,
    ShardForward as ShardForward,
    named_outputs as named_outputs,
    read_outputs as read_outputs,
)
