"""What running a program costs, in time and in memory."""
