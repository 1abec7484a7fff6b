"""Forms in which families of models write tool calls."""
