"""The server's own processes: its command line, how they are started, and the controller with the supervisor in it."""
