"""The built-in policies, each written as a cell would write it."""
