"""Preparation of data ahead of a run: in parts, by any number of processes and hosts, with an
identical result."""
