"""How the ranks that share a model find one another and add up what each of them computes."""
