"""Read and check the arguments of an updater."""

from lockstep.updaters.setup import recipe as recipe
from lockstep.updaters.setup.accumulation import (
    Accumulation as Accumulation,
    batches_per_update as batches_per_update,
    most_batches as most_batches,
)
from lockstep.updaters.setup.batches import (
    Conversion as Conversion,
    Converter as Converter,
    DeviceShards as DeviceShards,
    batch_size as batch_size,
    changes as changes,
    check_whole as check_whole,
    copied as copied,
    may_draw as may_draw,
    read_batches as read_batches,
)
from lockstep.updaters.setup.names import (
    MAIN as MAIN,
    Names as Names,
    by_name as by_name,
    iterators_by_name as iterators_by_name,
    named_schedulers as named_schedulers,
)
from lockstep.updaters.setup.networks import (
    NamedLoss as NamedLoss,
    NetworkSet as NetworkSet,
    check_unnamed as check_unnamed,
    parse_networks as parse_networks,
)
from lockstep.updaters.setup.recipe import (
    OnOverflow as OnOverflow,
    Recipe as Recipe,
    check_functions as check_functions,
)
