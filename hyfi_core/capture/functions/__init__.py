"""Functions of the user's with a backward of their own: operators of the captured program."""
