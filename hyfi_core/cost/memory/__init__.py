"""What ranks hold in memory in a step: of each operator, stage and plan."""
