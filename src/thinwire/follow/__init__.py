"""The plan in force while a model trains: groups of gradients, their measured times, and when to plan again."""
