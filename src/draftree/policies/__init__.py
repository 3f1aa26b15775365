"""Policies: they choose which drafted tokens become a tree."""
