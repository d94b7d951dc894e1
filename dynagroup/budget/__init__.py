"""Does a batch fit? One monotone question, and the budgets that answer it."""

from dynagroup.budget.base import AdditiveCap, AllOf, Budget, padded_tokens
from dynagroup.budget.learning import LearningBudget, OomReport
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget, as_budget

__all__ = [
    "AdditiveCap",
    "AllOf",
    "Budget",
    "LearningBudget",
    "MemoryBudget",
    "OomReport",
    "TokenBudget",
    "as_budget",
    "padded_tokens",
]
