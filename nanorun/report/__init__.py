"""Plots of runs and of evaluations."""
