"""Communication between the ranks of a process group: checked messages, one lane of jobs, and agreement."""
