"""The names of four older systems over lockstep's own parts.

Each module has the classes, parameters, order, defaults and methods of one system, and maps them onto the
core. What is peculiar to the system stands in its module and is called so: its way to cut a batch, its sum
in the place of a mean, its counting. ``docs/coming-from`` has a page for each. Nothing in the core knows of
this part, and ``import lockstep`` does not import it.
"""
