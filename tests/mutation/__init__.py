"""Mutations: small faults planted into the code, each of which its nearest tests must notice."""
