"""The engine of the analyses: inputs laid out as forward passes, and copies of a kept run with some states replaced."""
