"""The cost model, which decides what pays; kernel groups will be cut here."""
