"""Communication patterns: how the pieces of a tensor travel between ranks."""
