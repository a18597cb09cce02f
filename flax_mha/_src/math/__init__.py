"""Code that several implementations share."""
