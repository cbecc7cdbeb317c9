"""Numbers for people."""


def counted(number: int, noun: str) -> str:
    """Return a number of things.

    Example:
        >>> counted(1, "rank"), counted(8, "rank")
        ('1 rank', '8 ranks')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def figure(value: float | None, form: str) -> str:
    """Return a number in a format, and a dash for none.

    Example:
        >>> figure(0.125, ".1%"), figure(None, ".1%")
        ('12.5%', '-')
    """
    return "-" if value is None else format(value, form)
