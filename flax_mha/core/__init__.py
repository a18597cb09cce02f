"""One call as a value: its arguments checked, positions, what is known while tracing."""
