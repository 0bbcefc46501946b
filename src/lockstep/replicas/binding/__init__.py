"""Inputs whose names and shapes are fixed before the first batch, and the output shapes that follow from them.

Only `ReplicaGroup` uses this package, for `bind`, `reshape` and `output_shapes`.
"""

from lockstep.replicas.binding.bound_inputs import BoundInputs as BoundInputs, Description as Description
from lockstep.replicas.binding.input_binding import InputBinding as InputBinding
