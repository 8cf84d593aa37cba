"""One saved response, generated again, or from one of its turns on with another answer (`megarl.replay`)."""
