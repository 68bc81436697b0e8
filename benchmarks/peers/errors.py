"""What goes wrong outside: an environment that is missing, a contestant that gives up."""


class PeerError(Exception):
    """The comparison cannot go on. The text is for the person who ran it."""
