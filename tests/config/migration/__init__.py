"""Tests of the migration of other libraries' configurations."""
