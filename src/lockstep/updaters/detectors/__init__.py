"""Notice in the first updates what makes a result depend on where shards are computed."""

from lockstep.updaters.detectors.first_updates import FirstUpdates as FirstUpdates
