"""Failure handling: a rank that fails, is killed or deadlocks stops all ranks."""
