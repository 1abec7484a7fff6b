"""What proposes tokens ahead of the model: a file a drafter. It decides how fast a request goes, and nothing else."""
