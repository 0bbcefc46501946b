"""Replicas of one model, one thread per replica, and the settings under which the threads compute."""
