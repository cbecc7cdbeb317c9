"""Numbers of things for people."""


def counted(number: int, noun: str) -> str:
    """Return a number of things.

    Example:
        >>> counted(1, "rank"), counted(8, "rank")
        ('1 rank', '8 ranks')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
