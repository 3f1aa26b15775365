"""Policies: which drafted tokens become a tree."""
