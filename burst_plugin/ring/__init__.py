"""The machine: from a call's arguments to a plan, and a schedule run step by step."""
