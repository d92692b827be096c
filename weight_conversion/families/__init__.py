"""One file a family: how its config is read, and the table of its tensors."""
