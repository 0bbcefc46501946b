"""Read and check the arguments of an updater."""

from lockstep.updaters.setup import recipe as recipe
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
    NamedLoss as NamedLoss,
    Names as Names,
    NetworkSet as NetworkSet,
    by_name as by_name,
    check_unnamed as check_unnamed,
    iterators_by_name as iterators_by_name,
    itself as itself,
    named_schedulers as named_schedulers,
    parse_networks as parse_networks,
)
from lockstep.updaters.setup.recipe import (
    Accumulation as Accumulation,
    OnOverflow as OnOverflow,
    Recipe as Recipe,
    batches_per_update as batches_per_update,
    check_functions as check_functions,
    most_batches as most_batches,
)
