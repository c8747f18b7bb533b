"""The error that ends a run of the demo."""


class DemoError(Exception):
    """A run cannot start or continue. The message says what is wrong, what was expected and how to fix it."""


def first_line(error: Exception) -> str:
    """The first line of the error's message, or the name of its class if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)
