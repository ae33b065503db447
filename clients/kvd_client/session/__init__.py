"""One session with one daemon: its socket, what it was granted, and how it ends."""
