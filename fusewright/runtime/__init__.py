"""The machine: cache, device facts, memory; noticing changed modules; keeping derived weights."""
