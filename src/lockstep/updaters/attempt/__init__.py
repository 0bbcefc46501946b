"""One attempt at an update: its request, its state, the settings of its thread, and the deferred overflow check."""
