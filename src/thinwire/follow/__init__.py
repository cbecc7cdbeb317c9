"""The plan in force while a model trains: groups of gradients, how long they take, and when to plan again."""
