"""Policies that are fitted to a drafter."""
