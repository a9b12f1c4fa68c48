"""Measurements, and the machinery that they share with the tests."""
