"""Built-in scripts, alone in their directory, because a script's own directory comes first on the path of imports."""
