"""Budgets, which answer one question: does a batch fit?"""
