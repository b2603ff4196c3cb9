"""Ray Train starts the workers: ``strategy=ray_strategy()`` in place of Ray's ``RayDDPStrategy()``.

Needs Ray: ``pip install 'lightning-hetero[ray]'``. The workers are those of a local Ray, or of the cluster that Ray is
connected to.
"""

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train() -> None:
    import lightning as L
    from _model import Classifier, SlowSecondWorker, report, train_loader
    from ray.train.lightning import RayLightningEnvironment, prepare_trainer

    from lightning_hetero.strategies.ray import ray_strategy

    trainer = L.Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=ray_strategy(),
        plugins=[RayLightningEnvironment()],
        max_epochs=2,
        callbacks=[SlowSecondWorker()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    prepare_trainer(trainer).fit(Classifier(), train_loader())
    report(trainer)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"working_dir": __file__.rpartition("/")[0] or "."})
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2), torch_config=TorchConfig(backend="gloo")).fit()
    ray.shutdown()
