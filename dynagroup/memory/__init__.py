"""How much memory a batch takes: simulated, measured, or predicted."""

from dynagroup.memory.model import BytesMemoryModel, MemoryModel, PaddedTokens

__all__ = ["BytesMemoryModel", "MemoryModel", "PaddedTokens"]
