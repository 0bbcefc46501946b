"""Data transfer between ranks: point-to-point, control messages, and torch's collectives."""
