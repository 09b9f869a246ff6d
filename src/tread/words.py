"""Words of messages: numbers with their nouns, times."""


def counted(number: int, noun: str) -> str:
    """A number and its noun, which is regular.

    >>> counted(1, "image"), counted(2, "batch"), counted(0, "process")
    ('1 image', '2 batches', '0 processes')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number} {noun}{ending}"


def timed(seconds: float) -> str:
    """The time of a step.

    >>> timed(1.5), timed(0.0123)
    ('1.50 s', '12.3 ms')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
