"""Adapters of libraries whose models need little: one file for each, imported by those who use it."""
