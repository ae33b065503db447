"""What travels between a client and the daemon; PROTOCOL.md is the same in words, for other languages.

`wire` frames and limits, `requests` and `replies` over ZeroMQ, `session` over the session socket.
"""
