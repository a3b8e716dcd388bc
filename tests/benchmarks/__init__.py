"""Measurements, each a script that prints a table; nothing here is collected as a test."""
