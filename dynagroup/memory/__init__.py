"""Finds how many bytes of memory a batch takes: by simulation, by measurement, or by a regressor."""

from dynagroup.memory.measurements import Measurement, Measurements, measure, simulate
from dynagroup.memory.profile import ProfiledMemory
from dynagroup.memory.protocols import BytesMemoryModel, MemoryModel, PaddedTokens
from dynagroup.memory.regressor import MemoryRegressor
from dynagroup.memory.traced import TracedMemory
from dynagroup.memory.workload import Workload

__all__ = [
    "BytesMemoryModel",
    "Measurement",
    "Measurements",
    "MemoryModel",
    "MemoryRegressor",
    "PaddedTokens",
    "ProfiledMemory",
    "TracedMemory",
    "Workload",
    "measure",
    "simulate",
]
