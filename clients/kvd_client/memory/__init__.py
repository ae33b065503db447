"""Where the blocks of a sequence lie in this process: mapped host memory, a card, or copies."""
