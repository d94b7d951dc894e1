"""The four errors that dynagroup raises for its users."""

__all__ = ["AlignmentError", "BudgetError", "ConfigError", "StateError"]


class ConfigError(ValueError):
    """An argument is wrong. The message names the argument, its value and the way out."""


class BudgetError(ValueError):
    """A sample or batch does not fit the budget, or a budget breaks its law."""


class StateError(ValueError):
    """A saved state does not belong to this run, or is damaged."""


class AlignmentError(RuntimeError):
    """Ranks disagree: their data, seeds or settings differ, or one of them has ended."""
