"""Two replicas and the shim under faults that are drawn, with real clients: `python -m tests.chaos --help`."""
