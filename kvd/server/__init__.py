"""Frames <-> messages: the ROUTER loop and the session sockets. No policy; that is `kvd.service`.

`server` is the loop. It has two kinds of socket: the session socket (`lobby` takes a connection to its Hello,
`channel` is one afterwards) and the ROUTER (`router`, which hears only whom `admission` let in). A message counts only
when `sessions` knows its token and the kernel's word about its sender (`kernel`) is the session's own. Everything runs
on the thread that calls `Server.run`.
"""
