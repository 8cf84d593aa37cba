"""The one exception for input that a user can mend."""


class UsageError(Exception):
    """Wrong input: one line that names what is wrong, the value, and what is allowed.

    Programs print the line on rank 0 and leave with exit status 2, before any work starts.
    """
