"""How the loss of a step is computed: for each micro-batch, or once over the whole batch."""
