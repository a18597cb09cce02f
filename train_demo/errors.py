"""The error that the command line shows as one line."""


class UserError(Exception):
    """Something that the person at the command line can mend; its text is one line and says how."""
