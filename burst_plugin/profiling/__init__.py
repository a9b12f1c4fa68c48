"""What a rank did, and when: recorded, tabulated, drawn."""
