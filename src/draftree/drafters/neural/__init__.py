"""Networks that several drafters share."""
