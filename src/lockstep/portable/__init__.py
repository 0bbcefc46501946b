"""Kernels whose bits are the same on every x86-64 processor with AVX2 and FMA.

Nothing here is in place, and no module but `settings` and `switch` is imported, until portable kernels are chosen.
"""

from lockstep.portable.settings import (
    PORTABLE_ENV as PORTABLE_ENV,
    VARIABLES as VARIABLES,
    ask_for_portable_kernels as ask_for_portable_kernels,
    machine_problem as machine_problem,
)
from lockstep.portable.switch import (
    is_portable as is_portable,
    use_portable_kernels as use_portable_kernels,
    use_portable_kernels_if_asked as use_portable_kernels_if_asked,
)
