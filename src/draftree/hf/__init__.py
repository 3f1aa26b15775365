"""draftree inside transformers' `generate`."""
