"""Loggers, which write the observed values for the services and tools that display them."""
