"""Laws that hold for every feature, over the rows of one table."""
