"""What a snapshot holds, and the bytes that stand for it."""
