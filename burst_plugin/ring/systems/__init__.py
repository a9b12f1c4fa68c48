"""Published systems that do more than go around a ring: a file each, behind one interface (`group_exchange`)."""
