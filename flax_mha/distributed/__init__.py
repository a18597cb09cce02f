"""A call split over the devices of a mesh."""
