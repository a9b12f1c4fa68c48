"""What published systems do besides going around a ring: a file each, behind one interface (`group_exchange`)."""
