"""The one exception that means "the user can mend this": commands print it as one line and exit with 1."""


class TernError(Exception):
    """A problem with the input or the machine; its message names what was found, and the way out."""
