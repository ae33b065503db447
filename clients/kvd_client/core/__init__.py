"""The verbs, sans-IO: generators that yield requests and are sent the replies, shared by both transports."""
