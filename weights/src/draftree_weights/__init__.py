"""Trained weights of draftree: files alone, by target."""
