"""What carries requests and drives the verbs: blocking from any thread, or in an asyncio event loop."""
