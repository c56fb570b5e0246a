"""What a plan costs and how it looks: the costs type from stages, and the table a user reads."""
