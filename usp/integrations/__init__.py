"""Adapters to other libraries. Each is imported by its own name and needs the extra of that name."""
