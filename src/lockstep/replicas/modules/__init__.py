"""Modules that can be used anywhere in a network: data parallel, or on one device."""

from lockstep.replicas.modules.data_parallel import DataParallel as DataParallel
from lockstep.replicas.modules.on_device import ModuleWrapper as ModuleWrapper, OnDevice as OnDevice
