"""Bytes between the ranks of a process group: messages with checksums, one lane of jobs, and what all ranks must agree
on."""
