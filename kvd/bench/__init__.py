"""`kvd bench`: the numbers kvd promises, each measured beside its limit, interleaved, in the same run.

`row` is what one number is and how things are timed, `catalogue` lists the rows, `private_daemon` starts the daemon
that they run against; every other module measures one group of rows and says in its docstring what exactly is timed.
"""
