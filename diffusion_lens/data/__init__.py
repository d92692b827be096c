"""Facts to train on and to ask for."""
