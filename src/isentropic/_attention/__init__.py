"""Attention: the public functions, the plan of a call, and the backends that compute it."""
