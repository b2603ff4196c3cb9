"""The elastic strategy under Lightning."""
