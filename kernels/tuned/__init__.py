"""Numbers that were tuned, one JSON file a GPU."""
