"""Features of every tissue tile of the slides of a store, written as other tools read them."""
