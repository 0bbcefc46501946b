"""The state that an update changes: how it is saved, loaded and restored."""
