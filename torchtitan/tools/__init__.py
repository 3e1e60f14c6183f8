"""Utilities for every layer: logging, error types, device facts, requests to stop."""
