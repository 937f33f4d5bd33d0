"""The CPU engine: a program of its own that serves one model over HTTP."""
