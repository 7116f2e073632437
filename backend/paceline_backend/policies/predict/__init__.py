"""Predictors: from feedback to each worker's performance model."""
