"""One stage on one rank: its recording, its copy of the modules, its forwards and the parts of its backwards."""
