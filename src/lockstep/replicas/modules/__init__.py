"""Modules that can be used anywhere in a network: data parallel, or on one device."""
