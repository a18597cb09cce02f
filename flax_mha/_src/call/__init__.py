"""One call of attention as a value: its arguments checked, its operands and options."""
