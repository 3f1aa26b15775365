"""One step's drafting, and a drafter's state from text to text."""
