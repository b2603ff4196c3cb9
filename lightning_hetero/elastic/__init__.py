"""Elastic averaging for irregular work (Adaptive SGD), independent of any trainer."""

from lightning_hetero.elastic.batch_queue import ElasticWorkerError
from lightning_hetero.elastic.config import OWN_LOOP, ElasticConfig
from lightning_hetero.elastic.engine import ElasticEngine
from lightning_hetero.elastic.merging.merge_record import MergeRecord
from lightning_hetero.elastic.merging.replica import Replica

__all__ = ["OWN_LOOP", "ElasticConfig", "ElasticEngine", "ElasticWorkerError", "MergeRecord", "Replica"]
