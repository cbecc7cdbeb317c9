"""What papers say in formulas, next to what the library does."""
