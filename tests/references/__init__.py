"""Independent references that tests compare against."""
