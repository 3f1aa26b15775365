"""Text in and out: completions, conversations, stop texts."""
