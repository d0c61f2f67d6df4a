"""Engines: several ways to one computation, chosen for the caller."""
