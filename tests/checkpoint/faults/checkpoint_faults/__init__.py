"""The fault campaign: all that can end a process, lose a host or alter a byte, and what a restart makes of it."""
