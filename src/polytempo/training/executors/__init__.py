"""Where jobs run: in this process, on worker processes, on a Ray cluster."""
