"""Checks of a target and a drafter: exactness, fit, faults of exports."""
