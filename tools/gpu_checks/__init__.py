"""The parts of tools/gpu_check.py: each module checks one thing and yields rows of the table."""
