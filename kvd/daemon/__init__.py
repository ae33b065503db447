"""The daemon's life: folder and lock, start, ready, loop, signals, clean stop, exit code.

| signal          | what happens                                                                                 |
|-----------------|----------------------------------------------------------------------------------------------|
| SIGTERM, SIGINT | clean stop: every client told, blocks copied to tiers that outlive the daemon (tiers.drain_s |
|                 | at most), the embedded server stopped, sockets and lock removed, exit code 0                 |
| SIGHUP          | the configuration is read again; of it, log.level, waits.*, the limits of users and sessions,|
|                 | tiers.spill, tiers.after_promote and [[pools]] take effect (`kvd.daemon.reload`), the rest   |
|                 | at the next start                                                                            |
| SIGABRT         | sent by a service manager whose watchdog was not fed: where the loop hangs, then the end     |
"""

from kvd.daemon.serve import serve

__all__ = ["serve"]
