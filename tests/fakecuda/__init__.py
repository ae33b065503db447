"""A libcuda.so.1 without a card, for tests: `machine.FakeMachine` makes one; the C beside this says what it copies."""
