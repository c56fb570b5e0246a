"""What carries values from stage to stage: queues between threads, sockets or torch's groups between processes."""
