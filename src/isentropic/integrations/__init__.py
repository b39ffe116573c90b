"""Integrations with other libraries. Each module needs its library, an extra of this package."""
