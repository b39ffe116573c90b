"""Integrations with other libraries. Each module needs its library, which is an extra of this package."""
