"""What several implementations share."""
