"""Adapters that let an inference engine keep its KV in kvd. Each needs its engine installed; none is imported here."""
