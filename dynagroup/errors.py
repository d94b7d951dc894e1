"""The four exception classes that dynagroup raises for mistakes of the user and of the data."""

__all__ = ["AlignmentError", "BudgetError", "ConfigError", "StateError"]


class ConfigError(ValueError):
    """Raised when an argument is wrong. The message names the argument, its value and what to do."""


class BudgetError(ValueError):
    """Raised when a sample or batch does not fit the budget, or when a budget accepts a batch but not a smaller one."""


class StateError(ValueError):
    """Raised when a saved state is damaged, or was saved by a run with other data or settings."""


class AlignmentError(RuntimeError):
    """Raised when the ranks have different data, seeds or settings, or when a rank has stopped."""
