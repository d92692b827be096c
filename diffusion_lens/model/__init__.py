"""The network and its hook points."""
