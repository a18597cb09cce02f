"""One call of attention as a value: its arguments are checked here."""
