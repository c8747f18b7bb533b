"""What the demo says to its user when it cannot go on."""


class DemoError(Exception):
    """A plain sentence: what is wrong and what to do about it."""
