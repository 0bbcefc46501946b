"""The interfaces of four older systems, built on lockstep.

Each module provides the classes, parameters, defaults and methods of one system, in their order, and maps them to
the core. Behavior that is specific to the system, such as its way to split a batch, its sum instead of a mean or
its way of counting, is in its module and documented as such. ``docs/coming-from`` has a page for each system. The
core does not depend on this package, and ``import lockstep`` does not import it.
"""
