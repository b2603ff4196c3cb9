"""Elastic averaging: how replicas are merged and batches scaled."""

__all__: list[str] = []
