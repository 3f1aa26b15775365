"""Acceptors: rules that keep only tokens that the target would have generated."""
