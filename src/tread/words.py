"""Words of messages: numbers with their nouns."""


def counted(number: int, noun: str) -> str:
    """A number and its noun, which is regular.

    >>> counted(1, "image"), counted(2, "batch"), counted(0, "process")
    ('1 image', '2 batches', '0 processes')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number} {noun}{ending}"
