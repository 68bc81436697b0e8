"""Scenarios and faults by name: what real engines got wrong, each with its exact numbers."""
