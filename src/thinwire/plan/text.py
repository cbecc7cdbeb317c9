"""Numbers for people: seconds, bytes and counts with a unit that suits."""


def format_seconds(seconds: float) -> str:
    """Format seconds with a unit that suits: ``1.23 s``, ``45.6 ms``, ``789 us``."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def format_bytes(size_bytes: float) -> str:
    """Format bytes with a unit that suits: ``1.2 GB``, ``4.8 MB``, ``16 kB``."""
    for scale, unit, digits in ((1e9, "GB", 2), (1e6, "MB", 1), (1e3, "kB", 0)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.{digits}f} {unit}"
    return f"{size_bytes:.0f} B"
