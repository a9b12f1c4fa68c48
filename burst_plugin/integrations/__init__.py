"""Adapters of libraries whose models need few changes: each is one module, imported by those who use it."""
