"""The stages of an update, and the objects that run them."""
