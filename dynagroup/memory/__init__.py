"""How much memory a batch takes: simulated, measured, or predicted."""

from dynagroup.memory.closed_form import ClosedForm
from dynagroup.memory.learned.regressor import MemoryRegressor
from dynagroup.memory.measurements import Measurement, Measurements
from dynagroup.memory.model import BytesMemoryModel, MemoryModel, PaddedTokens
from dynagroup.memory.profiled import ProfiledMemory
from dynagroup.memory.trace.measure import measure
from dynagroup.memory.trace.simulate import simulate
from dynagroup.memory.workload import Workload

__all__ = [
    "BytesMemoryModel",
    "ClosedForm",
    "Measurement",
    "Measurements",
    "MemoryModel",
    "MemoryRegressor",
    "PaddedTokens",
    "ProfiledMemory",
    "Workload",
    "measure",
    "simulate",
]
