"""The routing core: routes, plans, selections and the state of a forward. Needs torch and nothing else."""
