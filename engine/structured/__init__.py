"""What an answer must be: constraints to grammars, grammars to the tokens that may come next. No torch."""
