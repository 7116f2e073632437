"""Solvers: which samples, or how many, each worker gets."""
