"""Private code: nothing here is imported by users, and all of it may change."""
