"""Saved results, what they display, and the identity of the model that gave them."""
